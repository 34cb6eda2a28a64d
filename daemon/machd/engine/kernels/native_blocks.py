"""Layers of each architecture that machd's kernels compute whole, as the kernels' own blocks.

A block keeps the layer's weights where they lie; the layer itself stays as it is. A layer of which one part is not as described
here, or not computed by the kernels, has no block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import NamedTuple

import mlx.core as mx

from machd.engine.backend.native_kernels import native_kernels
from machd.engine.backend.untyped import Layer
from machd.engine.kernels.native_attention import HEAD_NUMBERS
from machd.engine.kernels.native_layers import is_native_norm, layer_weights
from machd.engine.kernels.native_llama import NativeAttention, NativeFeedForward, RotationTable

Norm = tuple[mx.array, float]
"""A norm's weight, float32, and what is added to the mean of squares."""


class RotationTables:
    """Tables of a model's rotations, one for all layers that rotate alike."""

    def __init__(self) -> None:
        self.tables: list[RotationTable] = []

    def number_of(self, rope: Layer, head_dim: int) -> int | None:
        """Return the number of a layer's table; None where a table cannot rotate as the layer does."""
        for number, table in enumerate(self.tables):
            if table.is_of(rope, head_dim):
                return number
        table = RotationTable(rope, head_dim)
        return self._added(table) if table.is_exact else None

    def number(self, table: RotationTable) -> int:
        """Return the number of a table that a layer has already."""
        is_known = any(one is table for one in self.tables)
        return self.tables.index(table) if is_known else self._added(table)

    def _added(self, table: RotationTable) -> int:
        self.tables.append(table)
        return len(self.tables) - 1


class Body(NamedTuple):
    """What an architecture computes around its layers, and its layers as blocks.

    Attributes:
        layer: Class of its layers.
        scaled: Embeddings of tokens [.., hidden] as the first layer takes them.
        norm: Norm of the last layer's result; None where the kernels compute none such.
        block: A layer's block, of the body and the layer; None where a part is not the kernels'.
    """

    layer: type[Layer]
    scaled: Callable[[Layer, mx.array], mx.array]
    norm: Callable[[Layer], Norm | None]
    block: Callable[[Layer, Layer, RotationTables], object | None]


def body_of(kind: type[Layer]) -> Body | None:
    """Return how a class of models of layers is computed; None for one that is not known here."""
    return _bodies().get(kind)


@cache
def _bodies() -> Mapping[type, Body]:
    from mlx_lm.models import gemma3_text, llama, qwen3  # noqa: PLC0415 - after import_mlx_lm()

    return {
        llama.LlamaModel: Body(llama.TransformerBlock, _as_is, _norm, _llama_block),
        qwen3.Qwen3Model: Body(qwen3.TransformerBlock, _as_is, _norm, _qwen3_block),
        gemma3_text.Gemma3Model: Body(
            gemma3_text.TransformerBlock, _gemma3_scaled, _norm_above_one, _gemma3_block
        ),
    }


def heads_of(attention: Layer) -> tuple[int, int, int]:
    """Return the heads of a layer's queries, those of its keys and values, and the numbers of each."""
    is_merged = isinstance(attention, NativeAttention)
    heads = attention.heads if is_merged else attention.n_heads
    kv_heads = attention.kv_heads if is_merged else attention.n_kv_heads
    outputs = sum(one.weight.shape[0] for one in _qkv_of(attention))
    return heads, kv_heads, outputs // (heads + 2 * kv_heads)


def layers_of_block(block: Layer) -> Sequence[Layer]:
    """Return the layers whose weights a block has, in its order."""
    attention, mlp = block.self_attn, block.mlp
    return [*_qkv_of(attention), attention.o_proj, *_gate_up_of(mlp), mlp.down_proj]


def _as_is(body: Layer, embedded: mx.array) -> mx.array:
    del body
    return embedded


def _gemma3_scaled(body: Layer, embedded: mx.array) -> mx.array:
    return embedded * mx.array(body.args.hidden_size**0.5, mx.bfloat16).astype(embedded.dtype)


def _norm(layer: Layer, name: str = "norm") -> Norm | None:
    norm = layer[name]
    return (norm.weight, norm.eps) if is_native_norm(norm) else None


def _norm_above_one(layer: Layer, name: str = "norm") -> Norm | None:
    """Return a norm whose weight is stored less one."""
    norm = layer[name]
    weight = (1.0 + norm.weight).astype(mx.float32)
    mx.eval(weight)
    return weight, norm.eps


def _llama_block(_: Layer, block: Layer, tables: RotationTables) -> object | None:
    # A window of mlx-lm's llama hides tokens from some layers.
    return None if block.use_sliding else _plain_block(block, tables, {})


def _qwen3_block(_: Layer, block: Layer, tables: RotationTables) -> object | None:
    attention = block.self_attn
    norms = {"query_norm": _norm(attention, "q_norm"), "key_norm": _norm(attention, "k_norm")}
    return None if None in norms.values() else _plain_block(block, tables, norms)


def _plain_block(
    block: Layer, tables: RotationTables, options: Mapping[str, object]
) -> object | None:
    norms = {
        "input_norm": _norm(block, "input_layernorm"),
        "post_norm": _norm(block, "post_attention_layernorm"),
    }
    return None if None in norms.values() else _made(block, tables, {**norms, **options})


def _gemma3_block(body: Layer, block: Layer, tables: RotationTables) -> object | None:
    attention = block.self_attn
    return _made(
        block,
        tables,
        {
            "input_norm": _norm_above_one(block, "input_layernorm"),
            "output_norm": _norm_above_one(block, "post_attention_layernorm"),
            "post_norm": _norm_above_one(block, "pre_feedforward_layernorm"),
            "down_norm": _norm_above_one(block, "post_feedforward_layernorm"),
            "query_norm": _norm_above_one(attention, "q_norm"),
            "key_norm": _norm_above_one(attention, "k_norm"),
            "activation": "gelu",
            "window": body.window_size if attention.is_sliding else 0,
        },
    )


def _made(block: Layer, tables: RotationTables, options: Mapping[str, object]) -> object | None:
    """Make a block of a layer's products, and of its norms and other options; None where a product is not the kernels'."""
    attention, mlp = block.self_attn, block.mlp
    if not _is_known(attention, mlp):
        return None
    output, down = layer_weights(attention.o_proj), layer_weights(mlp.down_proj)
    qkv, gate_up = _weights(_qkv_of(attention)), _weights(_gate_up_of(mlp))
    if output is None or down is None or qkv is None or gate_up is None:
        return None
    heads, kv_heads, head_dim = heads_of(attention)
    if head_dim % HEAD_NUMBERS:
        return None
    if isinstance(attention, NativeAttention):
        table: int | None = tables.number(attention.table)
    else:
        table = tables.number_of(attention.rope, head_dim)
    if table is None:
        return None
    try:
        made: object = native_kernels().LlamaBlock(
            qkv=qkv,
            output=output,
            gate_up=gate_up,
            down=down,
            heads=heads,
            kv_heads=kv_heads,
            scale=attention.scale,
            table=table,
            **options,
        )
    except ValueError:  # gates and ups of different bits
        return None
    return made


def _is_known(attention: Layer, mlp: Layer) -> bool:
    """Return False for parts that are merged, and not computed by the kernels: some rotations have no table."""
    return (isinstance(attention, NativeAttention) or "q_proj" in attention) and (
        isinstance(mlp, NativeFeedForward) or "gate_proj" in mlp
    )


def _qkv_of(attention: Layer) -> Sequence[Layer]:
    if isinstance(attention, NativeAttention):
        return [attention.qkv_proj]
    return [attention.q_proj, attention.k_proj, attention.v_proj]


def _gate_up_of(mlp: Layer) -> Sequence[Layer]:
    if isinstance(mlp, NativeFeedForward):
        return [mlp.gate_up_proj]
    return [mlp.gate_proj, mlp.up_proj]


def _weights(layers: Sequence[Layer]) -> list[object] | None:
    weights = [layer_weights(layer) for layer in layers]
    return None if None in weights else weights
