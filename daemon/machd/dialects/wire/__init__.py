"""Fields of request bodies: strict decoding, bounds, refusals, raw JSON."""
