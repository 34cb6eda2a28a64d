"""Proposers of draft tokens, which the step verifies: prompt lookup, a draft model, DFlash."""
