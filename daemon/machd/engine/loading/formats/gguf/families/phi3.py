"""Phi 3, Phi 3.5 and Phi 4."""

from __future__ import annotations

import math
from collections.abc import Mapping

from machd.engine.loading.formats.gguf.families.family import Family
from machd.engine.loading.formats.gguf.families.transformer import (
    NAMES,
    partial_rotary_factor,
    refuse_head_dim,
    refuse_rope_scaling,
    transformer_config,
)
from machd.engine.loading.formats.gguf.header import GgufHeader
from machd.errors import ModelFormatError

_LONG, _SHORT = "rope_factors_long.weight", "rope_factors_short.weight"

_SPLIT = frozenset({"blk.*.attn_q", "blk.*.attn_k", "blk.*.attn_v", "blk.*.ffn_gate"})
_MERGED = {
    "blk.*.attn_qkv": "model.layers.*.self_attn.qkv_proj",
    "blk.*.ffn_up": "model.layers.*.mlp.gate_up_proj",
}


def _config(header: GgufHeader) -> dict[str, object]:
    refuse_head_dim(header)
    config = transformer_config(header)
    head_dim = config["head_dim"]
    assert isinstance(head_dim, int)
    if not header.has(_LONG) or header.text("phi3.rope.scaling.type", "longrope") != "longrope":
        refuse_rope_scaling(header)
    else:
        _check_attention_factor(header)
    return config | {
        "partial_rotary_factor": partial_rotary_factor(header, head_dim),
        "original_max_position_embeddings": header.integer(
            "phi3.rope.scaling.original_context_length", header.integer("phi3.context_length")
        ),
    }


def _check_attention_factor(header: GgufHeader) -> None:
    """Refuse another scale of rotated queries and keys than mlx-lm's, which it computes from the context's growth.

    Raises:
        ModelFormatError: The file has another.
    """
    original = header.integer("phi3.rope.scaling.original_context_length")
    growth = header.integer("phi3.context_length") / max(original, 2)
    computed = 1.0 if growth <= 1 else math.sqrt(1 + math.log(growth) / math.log(max(original, 2)))
    stored = header.number("phi3.rope.scaling.attn_factor", 1.0)
    if not math.isclose(stored, computed, rel_tol=1e-4):
        raise ModelFormatError(
            f"{header.path.name}: phi3.rope.scaling.attn_factor is {stored:g}, where mlx-lm computes {computed:g}"
        )


def _rope_of_factors(
    _config: Mapping[str, object], factors: Mapping[str, list[float]]
) -> dict[str, object]:
    long = factors[_LONG]
    return {"type": "longrope", "long_factor": long, "short_factor": factors.get(_SHORT, long)}


PHI3 = Family(
    "phi3",
    "phi3",
    {name: path for name, path in NAMES.items() if name not in _SPLIT} | _MERGED,
    _config,
    leaves_out=frozenset({_LONG, _SHORT}),
    rope_of_factors=_rope_of_factors,
)
