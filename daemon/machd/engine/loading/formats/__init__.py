"""Formats of a model's files: each gives an ``Opened``, checked and without a weight read."""
