"""A tokenizer for models that have none, which the probes compute with."""
