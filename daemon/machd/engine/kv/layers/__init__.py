"""Kinds of caches: for each, how a batch holds one cache of the model, and what one row's cache can do."""
