"""Parts of llama layers in a few operations of machd's own kernels, where these compute all of a layer's products.

They compute what :mod:`machd.engine.kernels.layers_in_one` does not take: other caches, and no caches at all.
"""

from __future__ import annotations

import mlx.core as mx
from mlx.nn.layers.base import Module

from machd.engine.backend.native_kernels import native_kernels
from machd.engine.backend.untyped import Cache, Layer
from machd.engine.kernels.native_attention import attend, attend_rows
from machd.engine.kernels.packed import attend_cached

_TABLE_POSITIONS = 1024
"""A table grows by so many."""

_TOLERANCE = 1e-5
"""Largest difference between a rotation from the table and the layer's own, for numbers around one."""


class RotationTable:
    """Cosines and sines of each position's angles, taken from a layer's own rotation once and kept.

    So a position's rotation has the same bits in a prompt and in a step. One table serves all layers that rotate alike.
    """

    def __init__(self, rope: Layer, head_dim: int) -> None:
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

    def is_of(self, rope: Layer, head_dim: int) -> bool:
        """Return True if a layer with heads of so many numbers rotates as this table."""
        return head_dim == 2 * self._half and rotate_alike(rope, self.rope)

    @property
    def is_exact(self) -> bool:
        """True if the table rotates as the layer does; it does not for other layouts of the pairs."""
        if getattr(self.rope, "dims", 2 * self._half) != 2 * self._half:
            return False
        heads = mx.sin(mx.arange(6 * 2 * self._half, dtype=mx.float32)).reshape(3, 1, 2, -1)
        positions = mx.array([0, 7, 1000], dtype=mx.int32)
        own = self.rope(heads.swapaxes(1, 2), offset=positions).swapaxes(1, 2)
        difference = self.rotate(heads, positions, 1001, rotated=2) - own
        return float(mx.abs(difference).max()) < _TOLERANCE


def rotate_alike(rope: Layer, other: Layer) -> bool:
    """Return True if two layers are of one class, with the same settings."""
    if type(rope) is not type(other):
        return False
    # A module keeps its settings as attributes and its arrays as items.
    mine, its = ({**vars(one), **one} for one in (rope, other))
    return mine.keys() == its.keys() and all(_equal(mine[key], its[key]) for key in mine)


def _equal(one: object, other: object) -> bool:
    if isinstance(one, mx.array) and isinstance(other, mx.array):
        return bool(mx.array_equal(one, other))
    return one == other


class NativeAttention(Module):
    """mlx-lm's llama attention with one projection for queries, keys and values."""

    def __init__(self, attention: Layer, qkv_proj: Layer, table: RotationTable) -> None:
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
        heads = self._rotate(heads, rotated, cache)
        queries, keys, values = (
            part.swapaxes(1, 2) for part in mx.split(heads, [self.heads, rotated], axis=2)
        )
        mixed = attend_cached(
            (queries, keys, values),
            cache,
            mask,
            scale=self.scale,
            attend=attend,
            attend_rows=attend_rows,
        )
        projected: mx.array = self.o_proj(mixed.swapaxes(1, 2).reshape(rows, tokens, -1))
        return projected

    def _rotate(self, heads: mx.array, rotated: int, cache: Cache) -> mx.array:
        """Turn the first ``rotated`` heads of [rows, tokens, heads, head_dim] to the positions behind what ``cache`` holds."""
        rows, tokens, _, _ = heads.shape
        begin = 0 if cache is None else cache.offset
        if hasattr(cache, "left_padding"):
            # A batch of mlx-lm's own, as bench compares with: its padding stands before position 0, where the table has none.
            turned = self.table.rope(heads[:, :, :rotated].swapaxes(1, 2), offset=begin)
            return mx.concatenate([turned.swapaxes(1, 2), heads[:, :, rotated:]], axis=2)
        if isinstance(begin, mx.array):
            return self.table.rotate(heads, begin, cache.width, rotated)
        positions = mx.array([begin] * rows, dtype=mx.int32)
        return self.table.rotate(heads, positions, begin + tokens, rotated)


class NativeFeedForward(Module):
    """mlx-lm's llama feed-forward part with one projection for gate and up."""

    def __init__(self, gate_up_proj: Layer, down_proj: Layer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.gate_up_proj = gate_up_proj
        self.down_proj = down_proj

    def __call__(self, x: mx.array) -> mx.array:
        """Compute [.., hidden] as mlx-lm's layer does."""
        down: mx.array = self.down_proj(native_kernels().silu_product(self.gate_up_proj(x)))
        return down
