"""GLM 4: gate and up are one matrix, four norms, and neighbours of a part of each head rotate; halves in models that see."""

from __future__ import annotations

import numpy as np

from support.checkpoints.gguf_checkpoint import Config, Floats, GgufRules, Metadata
from support.checkpoints.gguf_rules.common import exchanged, with_key


def _metadata(config: Config) -> Metadata:
    return {"rope.dimension_count": int(config["head_dim"] * config["partial_rotary_factor"])}


def _halves(config: Config, rows: Floats) -> Floats:
    """Put the rotary rows of each head in the order of llama.cpp's ``Glm4Model.normal_to_neox``."""
    head_dim = config["head_dim"]
    rotary = int(head_dim * config["partial_rotary_factor"])
    heads = rows.reshape(-1, head_dim, *rows.shape[1:])
    parts = [heads[:, :rotary:2], heads[:, 1:rotary:2], heads[:, rotary:]]
    return np.ascontiguousarray(np.concatenate(parts, axis=1).reshape(rows.shape))


RULES = [
    GgufRules(
        "glm4",
        "glm4",
        metadata=_metadata,
        faults={
            "whole heads rotate": with_key("glm4.rope.dimension_count", 32),
            "norms exchanged": exchanged("ffn_norm", "post_attention_norm"),
            "positions in sections": with_key(
                "glm4.rope.dimension_sections", [8, 4, 4, 0], is_new=True
            ),
        },
    ),
    GgufRules(
        "glm4",
        "glm4",
        case="sections",
        metadata=lambda config: _metadata(config) | {"rope.dimension_sections": [2, 3, 3, 0]},
        changes={
            "q_proj.weight": _halves,
            "k_proj.weight": _halves,
            "q_proj.bias": _halves,
            "k_proj.bias": _halves,
        },
    ),
]
