"""Qwen 2 and 2.5, dense and with experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from machd.engine.loading.formats.gguf.families.family import Family
from machd.engine.loading.formats.gguf.families.transformer import (
    EXPERTS,
    NAMES,
    check_heads,
    refuse_head_dim,
    refuse_rope_scaling,
    transformer_config,
)
from machd.engine.loading.formats.gguf.header import GgufHeader

if TYPE_CHECKING:
    import mlx.core as mx


def _config(header: GgufHeader) -> dict[str, object]:
    config = transformer_config(header)
    check_heads(header, config)
    refuse_head_dim(header)
    return config


def _moe_config(header: GgufHeader) -> dict[str, object]:
    refuse_rope_scaling(header)
    config = _config(header)
    of_dense = header.integer("qwen2moe.feed_forward_length")
    used = header.integer("qwen2moe.expert_used_count")
    of_expert = header.integer("qwen2moe.expert_feed_forward_length", of_dense // max(used, 1))
    of_shared = header.integer("qwen2moe.expert_shared_feed_forward_length", of_dense)
    return config | {
        "num_experts": header.integer("qwen2moe.expert_count"),
        "num_experts_per_tok": used,
        "moe_intermediate_size": of_expert,
        "shared_expert_intermediate_size": of_shared,
    }


def _one_row(_header: GgufHeader, weight: mx.array) -> mx.array:
    """Make a matrix of the shared expert's gate, which older converters stored as a vector."""
    return weight.reshape(1, -1)


QWEN2 = Family("qwen2", "qwen2", NAMES, _config)

QWEN2MOE = Family(
    "qwen2moe",
    "qwen2_moe",
    {
        **NAMES,
        **EXPERTS,
        "blk.*.ffn_gate_inp_shexp": "model.layers.*.mlp.shared_expert_gate",
        "blk.*.ffn_gate_shexp": "model.layers.*.mlp.shared_expert.gate_proj",
        "blk.*.ffn_up_shexp": "model.layers.*.mlp.shared_expert.up_proj",
        "blk.*.ffn_down_shexp": "model.layers.*.mlp.shared_expert.down_proj",
    },
    _moe_config,
    {"shared_expert_gate": _one_row},
)
