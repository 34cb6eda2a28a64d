"""``POST /v1/systemone``: typed questions about a state, answered with probabilities."""
