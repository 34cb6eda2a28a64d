"""Llama layers in a few operations of machd's own kernels, where these compute all of a layer's products.

A step's small operations take as long as its products. A prompt's layer has twelve of them here instead of about fifty, and that
of decoding rows is one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module

from machd.engine.backend.native_kernels import native_kernels
from machd.engine.backend.untyped import Cache, Layer
from machd.engine.kernels.native_attention import HEAD_NUMBERS, attend, attend_rows
from machd.engine.kernels.native_layers import is_native_norm, layer_weights
from machd.engine.kernels.packed import PackedCache, PackedPrompt
from machd.engine.kv.row_positions import SlabRows
from machd.engine.kv.slab import SlabCache

_TABLE_POSITIONS = 1024
"""A table grows by so many."""

_TOLERANCE = 1e-5
"""Largest difference between a rotation from the table and the layer's own, for numbers around one."""


class RotationTable:
    """Cosines and sines of each position's angles, taken from a layer's own rotation once and kept.

    So a position's rotation has the same bits in a prompt and in a step. One table serves all layers that rotate alike.
    """

    def __init__(self, rope: Layer, head_dim: int) -> None:
        """Begin without positions; ``rope`` is mlx-lm's, of heads of ``head_dim`` numbers."""
        self.rope = rope
        self._half = head_dim // 2
        self._cosines = self._sines = mx.zeros((0, self._half))

    def up_to(self, end: int) -> tuple[mx.array, mx.array]:
        """Return cosines and sines, float32 [positions, head_dim / 2] each, of all positions before ``end`` at least."""
        while (begin := self._cosines.shape[0]) < end:
            # The layer turns the halves (1, 0) to (cosine, sine) of the angles that it uses.
            unit = mx.concatenate([mx.ones((self._half,)), mx.zeros((self._half,))])
            unit = mx.broadcast_to(unit, (1, 1, _TABLE_POSITIONS, 2 * self._half))
            turned = self.rope(unit, offset=begin)[0, 0]
            self._cosines = mx.concatenate([self._cosines, turned[:, : self._half]])
            self._sines = mx.concatenate([self._sines, turned[:, self._half :]])
            mx.eval(self._cosines, self._sines)
        return self._cosines, self._sines

    def rotate(self, heads: mx.array, positions: mx.array, end: int, rotated: int) -> mx.array:
        """Turn the first ``rotated`` heads of [rows, tokens, heads, head_dim], whose rows begin at ``positions`` and end before ``end``."""
        turned: mx.array = native_kernels().rotate(
            heads, *self.up_to(end), positions, rotated=rotated
        )
        return turned

    @property
    def is_exact(self) -> bool:
        """True if the table rotates as the layer does; it does not for other layouts of the pairs."""
        heads = mx.sin(mx.arange(6 * 2 * self._half, dtype=mx.float32)).reshape(3, 1, 2, -1)
        positions = mx.array([0, 7, 1000], dtype=mx.int32)
        own = self.rope(heads.swapaxes(1, 2), offset=positions).swapaxes(1, 2)
        difference = self.rotate(heads, positions, 1001, rotated=2) - own
        return float(mx.abs(difference).max()) < _TOLERANCE


class NativeAttention(Module):
    """mlx-lm's llama attention with one projection for queries, keys and values."""

    def __init__(self, attention: Layer, qkv_proj: Layer, table: RotationTable) -> None:
        """Take a layer's parts; ``qkv_proj`` is the layer's three projections joined."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.qkv_proj = qkv_proj
        self.o_proj = attention.o_proj
        self.table = table
        self.heads: int = attention.n_heads
        self.kv_heads: int = attention.n_kv_heads
        self.head_dim: int = qkv_proj.weight.shape[0] // (self.heads + 2 * self.kv_heads)
        self.scale: float = attention.scale

    def __call__(
        self, x: mx.array, mask: mx.array | str | None = None, cache: Cache = None
    ) -> mx.array:
        """Compute [rows, tokens, hidden] as mlx-lm's layer does."""
        rows, tokens, _ = x.shape
        rotated = self.heads + self.kv_heads
        heads = self.qkv_proj(x).reshape(rows, tokens, rotated + self.kv_heads, -1)
        begin = 0 if cache is None else cache.offset
        if isinstance(begin, mx.array):
            positions, end = begin, cache.width
        else:
            positions, end = mx.array([begin] * rows, dtype=mx.int32), begin + tokens
        heads = self.table.rotate(heads, positions, end, rotated)
        parts = mx.split(heads, [self.heads, rotated], axis=2)
        queries, keys, values = (part.swapaxes(1, 2) for part in parts)
        scale = self.scale
        if isinstance(cache, PackedCache):
            mixed = cache.attend(
                queries, keys, values, scale=scale, attend=attend, attend_rows=attend_rows
            )
        elif isinstance(cache, SlabCache):
            mixed = attend_rows(queries, keys, values, cache, scale=scale, mask=mask)
        else:
            if cache is not None:
                keys, values = cache.update_and_fetch(keys, values)
            mixed = attend(queries, keys, values, scale=scale, mask=mask)
        projected: mx.array = self.o_proj(mixed.swapaxes(1, 2).reshape(rows, tokens, -1))
        return projected


class NativeFeedForward(Module):
    """mlx-lm's llama feed-forward part with one projection for gate and up."""

    def __init__(self, gate_up_proj: Layer, down_proj: Layer) -> None:
        """Take a layer's parts; ``gate_up_proj`` is two projections joined."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.gate_up_proj = gate_up_proj
        self.down_proj = down_proj

    def __call__(self, x: mx.array) -> mx.array:
        """Compute [.., hidden] as mlx-lm's layer does."""
        down: mx.array = self.down_proj(native_kernels().silu_product(self.gate_up_proj(x)))
        return down


class NativeBlock(Module):
    """mlx-lm's llama block; decoding rows, and prompts beside them, are computed in one operation."""

    def __init__(self, block: Layer, in_one: Any) -> None:  # noqa: ANN401 - of a package that may be absent
        """Take a block's parts, and the kernels' block of the same weights."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.self_attn = block.self_attn
        self.mlp = block.mlp
        self.input_layernorm = block.input_layernorm
        self.post_attention_layernorm = block.post_attention_layernorm
        self.use_sliding = block.use_sliding
        self._table: RotationTable = block.self_attn.table
        self._in_one = in_one

    def __call__(
        self, x: mx.array, mask: mx.array | str | None = None, cache: Cache = None
    ) -> mx.array:
        """Compute [rows, tokens, hidden] as mlx-lm's block does."""
        if isinstance(cache, SlabCache) and cache.takes_columns(mask):
            return self._computed_in_one(x, cache.width, cache, ())
        if isinstance(cache, PackedCache) and _takes_columns(cache):
            return self._computed_in_one(x, cache.width, cache.rows, cache.prompts)
        x = x + self.self_attn(self.input_layernorm(x), mask, cache)
        mixed: mx.array = x + self.mlp(self.post_attention_layernorm(x))
        return mixed

    def _computed_in_one(
        self, x: mx.array, end: int, rows: SlabCache | None, prompts: Sequence[PackedPrompt]
    ) -> mx.array:
        """Compute rows [rows, tokens, hidden] of slabs, and behind them the tokens of prompts, rows of one token each."""
        slabs = [] if rows is None else rows.slabs_to_write()
        columns = native_kernels().LlamaBlock.Columns
        seen = [
            *(columns(*own, slab.start, x.shape[1], *_prefix(rows, slab)) for slab, own in slabs),
            *(columns(*self._with_room(one), one.start, one.tokens) for one in prompts),
        ]
        count, is_in_order = len(x), all(slab.index is None for slab, _ in slabs)
        if not is_in_order:
            count = sum(slab.rows for slab, _ in slabs)
            x = mx.concatenate([*(slab.of(x) for slab, _ in slabs), x[count:]])
        x, *written = self._in_one(x, *self._table.up_to(end), seen)
        pairs = iter(zip(written[::2], written[1::2], strict=True))
        for (_, arrays), pair in zip(slabs, pairs, strict=False):
            arrays[:] = pair
        for prompt in prompts:
            prompt.cache.keys, prompt.cache.values = next(pairs)
        if is_in_order or rows is None:
            return x
        return mx.concatenate([rows.in_row_order([x[:count]]), x[count:]])

    def _with_room(self, prompt: PackedPrompt) -> tuple[mx.array, mx.array]:
        """Count a pass's tokens in a prompt's cache, and return its keys and values with columns for them."""
        cache = prompt.cache
        if cache.keys is None or cache.offset + prompt.tokens > cache.keys.shape[2]:
            attention = self.self_attn
            blank = mx.zeros((1, attention.kv_heads, prompt.tokens, attention.head_dim))
            cache.update_and_fetch(blank, blank)
        else:
            cache.offset += prompt.tokens
        return cache.keys, cache.values


def _prefix(rows: SlabCache | None, slab: SlabRows) -> Sequence[mx.array]:
    return () if rows is None else rows.prefix(slab) or ()


def _takes_columns(cache: PackedCache) -> bool:
    """Return True if rows and prompts are stored as they are."""
    from mlx_lm.models.cache import KVCache  # noqa: PLC0415 - after import_mlx_lm()

    are_plain = all(type(one.cache) is KVCache for one in cache.prompts)
    return are_plain and (cache.rows is None or cache.rows.takes_columns(None))


def native_block(block: Layer) -> NativeBlock | None:
    """Make one operation of a llama block whose parts machd's kernels compute; None of any other."""
    attention, mlp = block.self_attn, block.mlp
    norms = block.input_layernorm, block.post_attention_layernorm
    is_ours = isinstance(attention, NativeAttention) and isinstance(mlp, NativeFeedForward)
    if not (is_ours and all(map(is_native_norm, norms))):
        return None
    layers = (attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj)
    weights = [layer_weights(layer) for layer in layers]
    if None in weights or attention.head_dim % HEAD_NUMBERS:
        return None
    in_one = native_kernels().LlamaBlock(
        input_norm=norms[0].weight,
        post_norm=norms[1].weight,
        input_eps=norms[0].eps,
        post_eps=norms[1].eps,
        **dict(zip(("qkv", "output", "gate_up", "down"), weights, strict=True)),
        heads=attention.heads,
        kv_heads=attention.kv_heads,
        scale=attention.scale,
    )
    return NativeBlock(block, in_one)
