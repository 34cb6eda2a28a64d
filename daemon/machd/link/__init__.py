"""Frozen data that the front and a model's engine process share, and decisions that follow from it."""
