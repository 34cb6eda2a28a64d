"""StableLM: a part of each head rotates; the large one has a norm for each head, and attention beside the feed-forward."""

from __future__ import annotations

import re

import numpy as np

from support.checkpoints.gguf_checkpoint import Config, GgufRules, Metadata, Tensors
from support.checkpoints.gguf_rules.common import exchanged, with_key


def _metadata(config: Config) -> Metadata:
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    return {
        "context_length": 4096,
        "rope.freq_base": None,
        "rope.dimension_count": int(config["partial_rotary_factor"] * head_dim),
        "use_parallel_residual": config.get("use_parallel_residual", True),
    }


def _stacked(_config: Config, tensors: Tensors) -> Tensors:
    """Stack the norms of a layer's heads, in their order."""
    found: Tensors = {}
    heads: dict[str, list[tuple[int, str]]] = {}
    for name, values in tensors.items():
        one = re.fullmatch(r"(.+_layernorm)\.norms\.(\d+)\.weight", name)
        if one is None:
            found[name] = values
        else:
            heads.setdefault(f"{one[1]}.weight", []).append((int(one[2]), name))
    stacks = {
        name: np.stack([tensors[one] for _, one in sorted(pairs)]) for name, pairs in heads.items()
    }
    return found | stacks


def _turned(_metadata: Metadata, tensors: Tensors) -> None:
    """Put the norms of the heads in the opposite order."""
    for name in [one for one in tensors if "attn_q_norm" in one]:
        tensors[name] = tensors[name][::-1]


RULES = [
    GgufRules(
        "stablelm",
        "stablelm",
        metadata=_metadata,
        faults={
            "whole heads rotate": with_key("stablelm.rope.dimension_count", 32),
            "gate for up": exchanged("ffn_gate", "ffn_up"),
        },
    ),
    GgufRules(
        "stablelm",
        "stablelm",
        case="12b",
        config={
            "use_qkv_bias": False,
            "use_parallel_residual": True,
            "qk_layernorm": True,
            "partial_rotary_factor": 0.25,
        },
        metadata=_metadata,
        rearranged=_stacked,
        faults={"heads in another order": _turned},
    ),
]
