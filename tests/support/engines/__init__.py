"""Engines as tests run them: scripted, gated, tiny models; their rows, and faults to plant."""
