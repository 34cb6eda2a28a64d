"""GLM 4, dense, of April 2025 and later."""

from __future__ import annotations

from machd.engine.loading.formats.gguf.families.family import Family
from machd.engine.loading.formats.gguf.families.transformer import (
    NAMES,
    partial_rotary_factor,
    refuse_rope_scaling,
    transformer_config,
)
from machd.engine.loading.formats.gguf.header import GgufHeader

_MERGED_AND_NORMS = {
    "blk.*.ffn_up": "model.layers.*.mlp.gate_up_proj",
    "blk.*.post_attention_norm": "model.layers.*.post_self_attn_layernorm",
    "blk.*.post_ffw_norm": "model.layers.*.post_mlp_layernorm",
}


def _config(header: GgufHeader) -> dict[str, object]:
    refuse_rope_scaling(header)
    config = transformer_config(header)
    head_dim = config["head_dim"]
    assert isinstance(head_dim, int)
    return config | {
        "partial_rotary_factor": partial_rotary_factor(header, head_dim),
        "attention_bias": header.has("blk.0.attn_q.bias"),
        # The converter reorders the rows of models that see, for positions in sections, which are all the same for text.
        "rope_traditional": not any(header.numbers("glm4.rope.dimension_sections")),
    }


GLM4 = Family(
    "glm4",
    "glm4",
    {name: path for name, path in NAMES.items() if name != "blk.*.ffn_gate"} | _MERGED_AND_NORMS,
    _config,
    leaves_out=frozenset(),
)
