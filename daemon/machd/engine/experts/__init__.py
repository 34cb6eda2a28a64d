"""Experts on disk: a bank of those in memory, and the layers that compute with them."""
