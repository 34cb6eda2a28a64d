"""Qwen 3, dense and with experts."""

from __future__ import annotations

from machd.engine.loading.formats.gguf.families.family import Family
from machd.engine.loading.formats.gguf.families.transformer import (
    EXPERTS,
    HEAD_NORMS,
    NAMES,
    check_heads,
    refuse_rope_scaling,
    transformer_config,
)
from machd.engine.loading.formats.gguf.header import GgufHeader


def _config(header: GgufHeader) -> dict[str, object]:
    config = transformer_config(header)
    check_heads(header, config)
    return config


def _moe_config(header: GgufHeader) -> dict[str, object]:
    refuse_rope_scaling(header)
    used = header.integer("qwen3moe.expert_used_count")
    of_dense = header.integer("qwen3moe.feed_forward_length")
    # llama.cpp has experts in every layer, and their weights sum to 1.
    return _config(header) | {
        "num_experts": header.integer("qwen3moe.expert_count"),
        "num_experts_per_tok": used,
        "moe_intermediate_size": header.integer(
            "qwen3moe.expert_feed_forward_length", of_dense // max(used, 1)
        ),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    }


QWEN3 = Family("qwen3", "qwen3", {**NAMES, **HEAD_NORMS}, _config)

QWEN3MOE = Family(
    "qwen3moe",
    "qwen3_moe",
    {**NAMES, **HEAD_NORMS, **EXPERTS},
    _moe_config,
)
