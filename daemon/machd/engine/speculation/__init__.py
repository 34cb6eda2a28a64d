"""Tokens guessed ahead of a row and verified in one pass of the model."""
