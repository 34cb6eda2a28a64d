"""Mixtral, which llama.cpp's converter writes as a llama with experts."""

from __future__ import annotations

from machd.engine.loading.formats.gguf.families.family import Family
from machd.engine.loading.formats.gguf.families.transformer import (
    LLAMA_ORDER,
    NAMES,
    check_heads,
    experts_at,
    refuse_head_dim,
    refuse_rope_scaling,
    transformer_config,
)
from machd.engine.loading.formats.gguf.header import GgufHeader


def _config(header: GgufHeader) -> dict[str, object]:
    config = transformer_config(header)
    check_heads(header, config)
    refuse_head_dim(header)
    refuse_rope_scaling(header)
    return config | {
        "num_local_experts": header.integer("llama.expert_count"),
        "num_experts_per_tok": header.integer("llama.expert_used_count"),
    }


MIXTRAL = Family(
    "llama", "mixtral", {**NAMES, **experts_at("block_sparse_moe")}, _config, LLAMA_ORDER
)
