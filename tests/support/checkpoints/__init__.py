"""Model files that tests write: tiny, hollow or hostile."""
