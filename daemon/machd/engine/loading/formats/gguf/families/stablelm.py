"""StableLM."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from machd.engine.loading.formats.gguf.families.family import Change, Family
from machd.engine.loading.formats.gguf.families.transformer import (
    NAMES,
    partial_rotary_factor,
    refuse_head_dim,
    refuse_rope_scaling,
    transformer_config,
)
from machd.engine.loading.formats.gguf.header import GgufHeader
from machd.errors import ModelFormatError

if TYPE_CHECKING:
    import mlx.core as mx

_MOST_HEADS = 1024


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


def _row(index: int) -> Change:
    def change(_header: GgufHeader, rows: mx.array) -> mx.array:
        return rows[index]

    return change


def _with_head_norms(header: GgufHeader) -> Family:
    """Give each head the row of ggml's norms that is its own.

    Raises:
        ModelFormatError: There are more heads than any model has.
    """
    names, changes = dict(STABLELM.names), dict(STABLELM.changes)
    for one in ("q", "k"):
        stacked = f"blk.0.attn_{one}_norm.weight"
        if not header.has(stacked):
            continue
        heads = header.shape(stacked)[0]
        if heads > _MOST_HEADS:
            raise ModelFormatError(f"{header.path.name}: {stacked} has norms for {heads:,} heads")
        ends = [f".{one}_layernorm.norms.{head}" for head in range(heads)]
        names[f"blk.*.attn_{one}_norm"] = tuple(f"model.layers.*.self_attn{end}" for end in ends)
        changes |= {end: _row(head) for head, end in enumerate(ends)}
    return replace(STABLELM, names=names, changes=changes)


STABLELM = Family(
    "stablelm", "stablelm", NAMES, _config, leaves_out=frozenset(), variant=_with_head_norms
)
