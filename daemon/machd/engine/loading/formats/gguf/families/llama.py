"""Llama, and what llama.cpp's converter writes as such: Mistral, SmolLM2, and others of the same layers."""

from __future__ import annotations

from machd.engine.loading.formats.gguf.families.family import Family
from machd.engine.loading.formats.gguf.families.mixtral import MIXTRAL
from machd.engine.loading.formats.gguf.families.transformer import (
    LLAMA_ORDER,
    NAMES,
    biases,
    check_heads,
    transformer_config,
)
from machd.engine.loading.formats.gguf.header import GgufHeader


def llama_config(header: GgufHeader) -> dict[str, object]:
    """Make the configuration of mlx-lm's llama.

    Raises:
        ModelFormatError: A key is missing, or asks for what mlx-lm's llama has not.
    """
    config = transformer_config(header)
    check_heads(header, config)
    return config | biases(header)


def _variant(header: GgufHeader) -> Family:
    return MIXTRAL if header.integer("llama.expert_count", 0) else LLAMA


LLAMA = Family("llama", "llama", NAMES, llama_config, LLAMA_ORDER, variant=_variant)
