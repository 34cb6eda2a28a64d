"""GLM 4, dense, of April 2025 and later."""

from __future__ import annotations

from typing import TYPE_CHECKING

from machd.engine.loading.formats.gguf.families.family import Family
from machd.engine.loading.formats.gguf.families.transformer import (
    NAMES,
    partial_rotary_factor,
    refuse_rope_scaling,
    transformer_config,
)
from machd.engine.loading.formats.gguf.header import GgufHeader
from machd.errors import ModelFormatError

if TYPE_CHECKING:
    import mlx.core as mx

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
    }


def _neighbours(header: GgufHeader, rows: mx.array) -> mx.array:
    """Put the rotary rows of each head in mlx-lm's order, which pairs neighbours.

    The converter puts them in halves where a model sees images, whose positions have sections; those of text are all the same.
    """
    if not any(header.numbers("glm4.rope.dimension_sections")):
        return rows
    from mlx.core import concatenate  # noqa: PLC0415 - headers are read without mlx

    config = _config(header)
    head_dim, part = config["head_dim"], config["partial_rotary_factor"]
    assert isinstance(head_dim, int)
    assert isinstance(part, float)
    if rows.shape[0] % head_dim:
        raise ModelFormatError(
            f"{header.path.name}: a projection of shape {rows.shape} has no heads of {head_dim}"
        )
    heads = rows.reshape(-1, head_dim, *rows.shape[1:])
    first, rest = heads[:, : int(head_dim * part)], heads[:, int(head_dim * part) :]
    paired = first.reshape(len(first), 2, -1, *rows.shape[1:]).swapaxes(1, 2)
    return concatenate([paired.reshape(first.shape), rest], axis=1).reshape(rows.shape)


GLM4 = Family(
    "glm4",
    "glm4",
    {name: path for name, path in NAMES.items() if name != "blk.*.ffn_gate"} | _MERGED_AND_NORMS,
    _config,
    {".q_proj": _neighbours, ".k_proj": _neighbours},
    leaves_out=frozenset(),
)
