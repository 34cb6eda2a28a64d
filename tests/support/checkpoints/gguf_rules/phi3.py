"""Phi 3: queries, keys and values are one matrix, gate and up another; factors of the rotary frequencies are tensors."""

from __future__ import annotations

import math

import numpy as np

from support.checkpoints.gguf_checkpoint import Config, GgufRules, Metadata, Tensors
from support.checkpoints.gguf_rules.common import exchanged, with_key


def _metadata(config: Config) -> Metadata:
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    original = config.get("original_max_position_embeddings", config["max_position_embeddings"])
    return {
        "rope.scaling.original_context_length": original,
        "rope.dimension_count": int(config["partial_rotary_factor"] * head_dim),
        "attention.sliding_window": 0,
    }


def _long_metadata(config: Config) -> Metadata:
    original = config["original_max_position_embeddings"]
    growth = config["max_position_embeddings"] / original
    factor = math.sqrt(1 + math.log(growth) / math.log(original))
    return _metadata(config) | {"rope.scaling.attn_factor": factor}


def _factors(config: Config) -> Tensors:
    scaling = config["rope_scaling"]
    return {
        f"rope_factors_{one}.weight": np.array(scaling[f"{one}_factor"], np.float32)
        for one in ("long", "short")
    }


def _exchanged_factors(_metadata: Metadata, tensors: Tensors) -> None:
    long, short = "rope_factors_long.weight", "rope_factors_short.weight"
    tensors[long], tensors[short] = tensors[short], tensors[long]


RULES = [
    GgufRules(
        "phi3",
        "phi3",
        metadata=_metadata,
        faults={
            "whole heads rotate": with_key("phi3.rope.dimension_count", 32),
            "norms exchanged": exchanged("attn_norm", "ffn_norm"),
        },
    ),
    GgufRules(
        "phi3",
        "phi3",
        case="long",
        config={
            "tie_word_embeddings": True,
            "partial_rotary_factor": 0.75,
            "original_max_position_embeddings": 256,
            "rope_scaling": {
                "type": "longrope",
                "long_factor": [1.0 + index / 4 for index in range(12)],
                "short_factor": [1.0] * 12,
            },
        },
        metadata=_long_metadata,
        added=_factors,
        faults={
            "factors exchanged": _exchanged_factors,
            "no scale of attention": with_key("phi3.rope.scaling.attn_factor", None),
            "another scale of attention": with_key("phi3.rope.scaling.attn_factor", 1.3),
        },
    ),
]
