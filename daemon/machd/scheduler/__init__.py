"""Scheduler of sequences. Pure Python: no clock, no thread, no tensor."""
