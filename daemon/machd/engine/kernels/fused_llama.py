"""Llama layers for the CPU: the same weights and results from cheaper operations.

One projection instead of three, queries and keys rotated together by angles that are computed once
a step for all layers, and vectorised exponentials. (Merging the feed-forward part's projections gained
nothing.) A layer that is not exactly the measured one stays as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear

from machd.engine.backend.native_kernels import native_kernels
from machd.engine.backend.untyped import Cache, LanguageModel, Layer
from machd.engine.kernels.cpu_attention import attend, attend_rows
from machd.engine.kernels.exponential import silu_product
from machd.engine.kernels.layers_in_one import compute_layers_in_one
from machd.engine.kernels.native_layers import is_native
from machd.engine.kernels.native_llama import (
    NativeAttention,
    NativeFeedForward,
    RotationTable,
    rotate_alike,
)
from machd.engine.kernels.packed import attend_cached

_ROTATION_TOLERANCE = 1e-5
"""Largest difference between a rotation from a table and the layer's own, for numbers around one."""


def fuse_layers(model: LanguageModel) -> int:
    """Replace the layers that can be, their weights merged in place, not doubled; returns the number of attention layers."""
    from mlx_lm.models import llama  # noqa: PLC0415 - after import_mlx_lm()

    blocks = getattr(getattr(model, "model", None), "layers", None) or []
    rotations: list[_Rotation] = []
    count = 0
    for block in blocks:
        attention: Layer = getattr(block, "self_attn", None)
        if type(getattr(block, "mlp", None)) is llama.MLP:
            block.mlp = _feed_forward(block.mlp)
        if type(attention) is llama.Attention and _are_alike(_projections(attention)):
            rotation = next((one for one in rotations if one.is_of(attention.rope)), None)
            if rotation is None:
                rotation = _Rotation(attention.rope, attention.head_dim)
                rotations.append(rotation)
            block.self_attn = _attention(attention, rotation)
            count += 1
            # Layer by layer, so that old and new weights coexist for one layer only.
            mx.eval(block.parameters())
    compute_layers_in_one(model)
    mx.clear_cache()
    return count


def reads_by_slab(model: LanguageModel) -> bool:
    """Return True if every layer's attention reads the rows of a batch slab by slab."""
    blocks = getattr(getattr(model, "model", None), "layers", None) or []
    return bool(blocks) and all(
        type(getattr(block, "self_attn", None)) in (_Attention, NativeAttention) for block in blocks
    )


def takes_packed_caches(model: LanguageModel) -> bool:
    """Return True if every layer's attention can tell decoding rows from a prompt's tokens.

    A layer with a window cannot: the window is in the mask, and a packed pass has none.
    """
    return reads_by_slab(model) and not any(
        getattr(block, "use_sliding", False) for block in model.model.layers
    )


def shares_prefixes(model: LanguageModel) -> bool:
    """Return True if every layer's attention can read a prefix that rows share, in their float32."""
    return takes_packed_caches(model) and all(
        is_native(block.self_attn.qkv_proj) or block.self_attn.qkv_proj.weight.dtype == mx.float32
        for block in model.model.layers
    )


def first_logits(
    model: LanguageModel, token_ids: mx.array, caches: list[Cache], rows: int
) -> mx.array:
    """Compute a packed pass, of which the first ``rows`` tokens alone are followed by one: [rows, 1, vocabulary].

    Logits of a prompt's tokens would take a fifth of the time that the layers take for them.
    """
    from mlx_lm.models import llama  # noqa: PLC0415 - after import_mlx_lm()

    if type(model) is not llama.Model:
        every: mx.array = model(token_ids, cache=caches)
        return every[:rows]
    hidden = model.model(token_ids, caches)[:rows]
    tied = model.args.tie_word_embeddings
    logits: mx.array = (model.model.embed_tokens.as_linear if tied else model.lm_head)(hidden)
    return logits


def merged_parts(part: Layer) -> Mapping[str, Sequence[tuple[str, int]]]:
    """Return the layers of a part of the model that are several of mlx-lm's, by name: each one's name and outputs, in order."""
    if isinstance(part, NativeFeedForward):
        half = int(part.gate_up_proj.weight.shape[0]) // 2
        return {"gate_up_proj": [("gate_proj", half), ("up_proj", half)]}
    if isinstance(part, NativeAttention | _Attention):
        every = int(part.qkv_proj.weight.shape[0])
        head = every // (part.heads + 2 * part.kv_heads)
        queries, keys = part.heads * head, part.kv_heads * head
        return {"qkv_proj": [("q_proj", queries), ("k_proj", keys), ("v_proj", keys)]}
    return {}


class _Rotation:
    """The rotation by position, with the angles of a step computed once for all layers."""

    def __init__(self, rope: Layer, head_dim: int) -> None:
        self._rope = rope
        self._half = head_dim // 2
        # The layer rotates the halves (1, 0) to (cos, sin) of the angles that it uses.
        self._unit = mx.concatenate([mx.ones((self._half,)), mx.zeros((self._half,))])
        self._positions: mx.array | None = None
        self._table: tuple[mx.array, mx.array] = (self._unit, self._unit)
        self._has_table = self._is_exact(head_dim)
        self.native_table = self._native_table(head_dim)

    def _native_table(self, head_dim: int) -> RotationTable | None:
        """Make the table of machd's own kernels; None where they are missing, or turn other pairs."""
        if native_kernels() is None or not self._has_table:
            return None
        table = RotationTable(self._rope, head_dim)
        return table if table.is_exact else None

    def is_of(self, rope: Layer) -> bool:
        return rotate_alike(rope, self._rope)

    def __call__(self, heads: mx.array, positions: int | mx.array) -> mx.array:
        """Rotate [rows, heads, tokens, head_dim], whose rows begin at ``positions``."""
        if not self._has_table or isinstance(positions, int) or heads.shape[2] != 1:
            rotated: mx.array = self._rope(heads, offset=positions)
            return rotated
        return self._by_table(heads, positions)

    def _by_table(self, heads: mx.array, positions: mx.array) -> mx.array:
        if self._positions is not positions:
            rows = int(positions.shape[0])
            unit = mx.broadcast_to(self._unit.astype(heads.dtype), (rows, 1, 1, 2 * self._half))
            angles = self._rope(unit, offset=positions)
            self._table = angles[..., : self._half], angles[..., self._half :]
            self._positions = positions
        cos, sin = self._table
        first, second = heads[..., : self._half], heads[..., self._half :]
        return mx.concatenate([first * cos - second * sin, first * sin + second * cos], axis=-1)

    def _is_exact(self, head_dim: int) -> bool:
        """Return True if the table rotates as the layer does; it does not for other layouts of the pairs."""
        if head_dim != 2 * self._half:
            return False
        heads = mx.sin(mx.arange(6 * head_dim, dtype=mx.float32)).reshape(3, 2, 1, head_dim)
        positions = mx.array([0, 7, 1000], dtype=mx.int32)
        difference = self._by_table(heads, positions) - self._rope(heads, offset=positions)
        return float(mx.abs(difference).max()) < _ROTATION_TOLERANCE


class _Attention(Module):
    """mlx-lm's llama attention with one projection for queries, keys and values."""

    def __init__(self, attention: Layer, qkv_proj: Layer, rotation: _Rotation) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.qkv_proj = qkv_proj
        self.o_proj = attention.o_proj
        self._rotation = rotation
        self.heads: int = attention.n_heads
        self.kv_heads: int = attention.n_kv_heads
        self._scale: float = attention.scale

    def __call__(
        self, x: mx.array, mask: mx.array | str | None = None, cache: Cache = None
    ) -> mx.array:
        rows, tokens, _ = x.shape
        rotated = self.heads + self.kv_heads
        heads = self.qkv_proj(x).reshape(rows, tokens, rotated + self.kv_heads, -1)
        heads = heads.transpose(0, 2, 1, 3)  # [rows, heads of all three, tokens, head_dim]
        turned = self._rotation(heads[:, :rotated], cache.offset if cache is not None else 0)
        parts = turned[:, : self.heads], turned[:, self.heads :], heads[:, rotated:]
        mixed = attend_cached(
            parts, cache, mask, scale=self._scale, attend=attend, attend_rows=attend_rows
        )
        projected: mx.array = self.o_proj(mixed.transpose(0, 2, 1, 3).reshape(rows, tokens, -1))
        return projected


class _FeedForward(Module):
    """mlx-lm's llama feed-forward part with a vectorised activation."""

    def __init__(self, mlp: Layer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.gate_proj = mlp.gate_proj
        self.up_proj = mlp.up_proj
        self.down_proj = mlp.down_proj

    def __call__(self, x: mx.array) -> mx.array:
        down: mx.array = self.down_proj(silu_product(self.gate_proj(x), self.up_proj(x)))
        return down


def _attention(attention: Layer, rotation: _Rotation) -> Module:
    qkv_proj = _merged(_projections(attention))
    if is_native(qkv_proj) and rotation.native_table is not None:
        return NativeAttention(attention, qkv_proj, rotation.native_table)
    return _Attention(attention, qkv_proj, rotation)


def _feed_forward(mlp: Layer) -> Module:
    inputs = [mlp.gate_proj, mlp.up_proj]
    if _are_alike(inputs) and is_native(mlp.gate_proj):
        return NativeFeedForward(_merged(inputs), mlp.down_proj)
    return _FeedForward(mlp)


def _projections(attention: Layer) -> list[Layer]:
    return [attention.q_proj, attention.k_proj, attention.v_proj]


def _are_alike(layers: Sequence[Layer]) -> bool:
    """Return True if the layers are plain, or computed by machd's kernels, and alike, so that their weights can be joined."""
    if not all(type(layer) is Linear or is_native(layer) for layer in layers):
        return False
    kinds = {
        (
            type(one),
            frozenset(one),
            one.weight.dtype,
            *(getattr(one, name, None) for name in _PACKING),
        )
        for one in layers
    }
    return len(kinds) == 1


_PACKING = ("mode", "group_size", "bits")


def _merged(layers: Sequence[Layer]) -> Layer:
    merged = layers[0]
    for name in [name for name, value in merged.items() if isinstance(value, mx.array)]:
        merged[name] = mx.concatenate([layer[name] for layer in layers])
    return merged
