"""StableLM."""

from __future__ import annotations

from machd.engine.loading.formats.gguf.families.family import Family
from machd.engine.loading.formats.gguf.families.transformer import (
    NAMES,
    partial_rotary_factor,
    refuse_head_dim,
    refuse_rope_scaling,
    transformer_config,
)
from machd.engine.loading.formats.gguf.header import GgufHeader

_HEAD_NORMS = {
    "blk.*.attn_q_norm": "model.layers.*.self_attn.q_layernorm.norms.#",
    "blk.*.attn_k_norm": "model.layers.*.self_attn.k_layernorm.norms.#",
}
"""A norm for each head, which ggml stacks."""


def _config(header: GgufHeader) -> dict[str, object]:
    refuse_head_dim(header)
    refuse_rope_scaling(header)
    config = transformer_config(header, "layer_norm_eps")
    head_dim = config["head_dim"]
    assert isinstance(head_dim, int)
    return config | {
        "partial_rotary_factor": partial_rotary_factor(header, head_dim),
        "use_qkv_bias": header.has("blk.0.attn_q.bias"),
        "qk_layernorm": header.has("blk.0.attn_q_norm.weight"),
        # llama.cpp, too, goes by this norm: some files say the key otherwise.
        "use_parallel_residual": not header.has("blk.0.ffn_norm.weight"),
    }


STABLELM = Family("stablelm", "stablelm", {**NAMES, **_HEAD_NORMS}, _config, leaves_out=frozenset())
