"""KV events: which blocks the prefix cache has in memory, published for routers in vLLM's format."""
