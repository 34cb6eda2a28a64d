"""Clients and requests: well-behaved, hostile, recorded."""
