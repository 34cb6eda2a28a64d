"""Type aliases for objects of the untyped libraries, so that a signature says what it takes.

mlx-lm, transformers and tokenizers have no types that a checker could read; only ``engine`` uses their
objects.
"""

from __future__ import annotations

from typing import Any, TypeAlias

LanguageModel: TypeAlias = Any
"""A model of mlx-lm's: called with token ids (rows, tokens) and ``cache``, it gives logits."""

Layer: TypeAlias = Any
"""An ``mlx.nn`` layer whose attributes depend on its class."""

Cache: TypeAlias = Any
"""One cache object of ``mlx_lm.models.cache``, or a model's private one."""

Backend: TypeAlias = Any
"""A ``tokenizers.Tokenizer``: Rust, shared between threads."""

HfTokenizer: TypeAlias = Any
"""A transformers tokenizer, fast or slow."""

WrappedTokenizer: TypeAlias = Any
"""An ``mlx_lm.tokenizer_utils.TokenizerWrapper``."""
