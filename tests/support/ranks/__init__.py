"""Ranks on loopback: how they are started, and what each of them runs."""
