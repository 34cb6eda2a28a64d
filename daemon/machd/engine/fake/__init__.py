"""The scripted engine: no model and no tensor, the same answer every time, faults on request."""
