"""Compiled constraints, the matcher of each row, and the masks of a batch."""
