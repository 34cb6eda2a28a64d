"""A served model as the front knows it: decode mode, speculation, KV memory, readings, whether it lives."""
