"""Constraints compiled, a matcher for each row, and the masks of a batch."""
