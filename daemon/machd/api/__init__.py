"""Wire types: what clients send and get, bounded field by field."""
