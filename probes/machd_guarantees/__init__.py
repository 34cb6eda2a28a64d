"""Promises in seconds, measured as a scenario of the bench."""
