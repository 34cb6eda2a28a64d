"""Models that make vectors or labels of texts."""
