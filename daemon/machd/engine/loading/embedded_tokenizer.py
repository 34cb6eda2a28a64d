"""The embedded model's tokenizer and chat template, for generated models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from machd.engine.backend.mlx_lm_import import import_mlx_lm
from machd.engine.loading import embedded
from machd.engine.loading.formats.gguf.header import read_gguf_header
from machd.engine.loading.tokenizer_files import gguf_tokenizer

EMBEDDED_VOCABULARY_TOKENS = 49_152
"""Tokens of the embedded model."""


def write_embedded_tokenizer(
    directory: Path, cache_directory: Path, added_tokens: Sequence[str] = ()
) -> frozenset[int]:
    """Write the embedded model's tokenizer and chat template beside some weights; returns the tokens that end its texts.

    Args:
        directory: Directory of the weights.
        cache_directory: The user's, where the embedded model is kept.
        added_tokens: Tokens that are never split, and like Qwen2.5-Coder's not special.

    Returns:
        The end-of-text tokens.
    """
    import_mlx_lm()
    path = embedded.locate(cache_directory) or embedded.pull(cache_directory)
    tokenizer, _ = gguf_tokenizer(read_gguf_header(path), chat_template=None)
    tokenizer.wrapped._tokenizer.add_tokens(list(added_tokens))  # noqa: SLF001 - the library's own has no other way
    tokenizer.wrapped._tokenizer.save_pretrained(str(directory))  # noqa: SLF001
    return tokenizer.eos_token_ids
