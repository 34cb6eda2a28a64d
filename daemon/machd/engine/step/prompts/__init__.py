"""Prompts of a step: computed into caches of their own until their rows join a lane."""
