"""A served model as the front sees it: decode mode, speculation, KV memory, counts, and its engine process."""
