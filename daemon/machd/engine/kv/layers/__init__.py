"""Kinds of caches: for each, how a batch holds one cache of the model, and what one row's cache can do.

To add a kind: a class here, a line in :mod:`~machd.engine.kv.layers.kinds` and one in ``capabilities/facts.py``, and a
rule in ``capabilities/rules.py`` if it differs in what it allows. ``tests/unit/engine/kv/test_kinds.py`` holds the
tables together.
"""
