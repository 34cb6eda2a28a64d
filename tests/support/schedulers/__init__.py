"""Sequences and limits for tests of the scheduler."""
