"""Abilities of a model and the evidence for them. Pure: facts in, verdicts out."""
