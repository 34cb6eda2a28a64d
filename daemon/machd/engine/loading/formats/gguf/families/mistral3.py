"""Mistral Small 3, a llama, and Ministral 3, whose queries grow with their position."""

from __future__ import annotations

from machd.engine.loading.formats.gguf.families.family import Family
from machd.engine.loading.formats.gguf.families.llama import llama_config
from machd.engine.loading.formats.gguf.families.transformer import (
    LLAMA_ORDER,
    NAMES,
    check_heads,
    rope_scaling,
    transformer_config,
)
from machd.engine.loading.formats.gguf.header import GgufHeader

_GROWTH = "mistral3.attention.temperature_scale"


def _ministral_config(header: GgufHeader) -> dict[str, object]:
    config = transformer_config(header)
    check_heads(header, config)
    context_tokens = config["max_position_embeddings"]
    rotary = {"original_max_position_embeddings": context_tokens} | (rope_scaling(header) or {})
    rotary |= {
        "rope_theta": config["rope_theta"],
        "llama_4_scaling_beta": header.number(_GROWTH),
    }
    return config | {"rope_parameters": rotary}


def _variant(header: GgufHeader) -> Family:
    return MINISTRAL3 if header.number(_GROWTH, 0.0) else MISTRAL3


MINISTRAL3 = Family(
    "mistral3", "ministral3", NAMES, _ministral_config, LLAMA_ORDER, leaves_out=frozenset()
)

MISTRAL3 = Family("mistral3", "llama", NAMES, llama_config, LLAMA_ORDER, variant=_variant)
