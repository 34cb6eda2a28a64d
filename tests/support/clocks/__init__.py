"""Time that tests own, and waiting without sleeping."""
