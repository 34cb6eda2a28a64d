"""Llama, and what llama.cpp's converter writes as such: Mistral, SmolLM2, and others of the same layers."""

from __future__ import annotations

from machd.engine.loading.formats.gguf.families.family import Family
from machd.engine.loading.formats.gguf.families.transformer import (
    LLAMA_ORDER,
    NAMES,
    refuse_partial_rope,
    transformer_config,
)
from machd.engine.loading.formats.gguf.header import GgufHeader
from machd.errors import ModelArchitectureError


def _config(header: GgufHeader) -> dict[str, object]:
    if header.integer("llama.expert_count", 0):
        raise ModelArchitectureError(
            f"{header.path.name} is a mixture of experts of the llama family, which machd reads in mlx-lm layout only"
        )
    config = transformer_config(header)
    head_dim = config["head_dim"]
    assert isinstance(head_dim, int)
    refuse_partial_rope(header, head_dim)
    has_bias = header.has("blk.0.attn_q.bias")
    return config | {"attention_bias": has_bias, "mlp_bias": header.has("blk.0.ffn_up.bias")}


LLAMA = Family("llama", "llama", NAMES, _config, LLAMA_ORDER)
