"""From the MODEL argument to a model in memory: source, checkpoint, weights, facts."""
