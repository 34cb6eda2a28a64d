"""Prompts of a step: computed into caches of their own until their rows join a lane.

Reading order: prefill (one prompt), strategies (the ways to compute chunks), prefills (all prompts), scores.
A new way to compute chunks is a class in strategies and an entry in the list of prefills.
"""
