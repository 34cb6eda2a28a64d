"""Formats of a model's files: each gives the same, a model that is opened and not yet read."""
