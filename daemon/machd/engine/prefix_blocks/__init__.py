"""Keys and values of earlier texts, in blocks: a memory tier, and a disk tier behind it."""
