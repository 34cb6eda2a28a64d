"""Llama layers in a few operations of machd's own kernels, where these compute all of a layer's products.

A step's small operations take as long as its products. A prompt's layer has twelve of them here instead of about fifty, and all
layers of decoding rows, and of prompts beside them, are one.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
from mlx.nn.layers.base import Module

from machd.engine.backend.native_kernels import native_kernels
from machd.engine.backend.untyped import Cache, LanguageModel, Layer
from machd.engine.kernels.native_attention import HEAD_NUMBERS, attend, attend_rows
from machd.engine.kernels.native_layers import is_native_norm, layer_weights
from machd.engine.kernels.packed import PackedCache, PackedPrompt, attend_cached
from machd.engine.kernels.started_layers import class_of
from machd.engine.kv.layers.slab import SlabKv
from machd.engine.kv.row_positions import SlabRows

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


class NativeLayers:
    """All layers of a llama in one operation, for decoding rows and for prompts beside them."""

    def __init__(self, blocks: Sequence[object], attention: NativeAttention) -> None:
        native = native_kernels()
        self._in_one = native.LlamaLayers(blocks)
        self._columns = native.LlamaLayers.Columns
        self._table: RotationTable = attention.table
        self._head_dims: tuple[int, int] = attention.kv_heads, attention.head_dim

    @staticmethod
    def take(caches: Sequence[Cache]) -> bool:
        """Return True for a pass of rows, and of prompts beside them, that are stored as they are."""
        return all(map(_takes_columns, caches))

    def __call__(self, x: mx.array, caches: Sequence[Cache]) -> mx.array:
        """Compute [rows, tokens, hidden] as mlx-lm's layers do one after another.

        Args:
            x: The rows of slabs, and behind them the tokens of prompts, rows of one token each.
            caches: One a layer, which :meth:`take` has looked at.
        """
        rows, prompts = _parts(caches)
        by_slab = list(zip(*(one.slabs_to_write() for one in rows), strict=True))
        seen = [self._columns_of(rows, layers, x.shape[1]) for layers in by_slab]
        for prompt in prompts:
            held = [self._with_room(one) for one in prompt]
            seen.append(self._columns(*_turned(held), prompt[0].start, prompt[0].tokens))
        slabs = [layers[0][0] for layers in by_slab]
        table = self._table.up_to(caches[0].width)
        x, *written = self._in_one(_in_slab_order(x, slabs), *table, seen)
        pairs = iter(zip(written[::2], written[1::2], strict=True))
        for layers in by_slab:
            for (_, arrays), pair in zip(layers, pairs, strict=False):
                arrays[:] = pair
        for prompt in prompts:
            for one, pair in zip(prompt, pairs, strict=False):
                one.cache.keys, one.cache.values = pair
        return _in_row_order(x, slabs, rows)

    def _columns_of(
        self,
        caches: Sequence[SlabKv],
        layers: Sequence[tuple[SlabRows, list[mx.array]]],
        tokens: int,
    ) -> object:
        """Return the columns of one slab's rows in each layer, behind what these share."""
        slab = layers[0][0]
        prefixes = [prefix for one in caches if (prefix := one.prefix(slab)) is not None]
        held = [arrays for _, arrays in layers]
        return self._columns(*_turned(held), slab.start, tokens, *_turned(prefixes))

    def _with_room(self, prompt: PackedPrompt) -> tuple[mx.array, mx.array]:
        """Count a pass's tokens in a prompt's cache, and return its keys and values with columns for them."""
        cache = prompt.cache
        if cache.keys is None or cache.offset + prompt.tokens > cache.keys.shape[2]:
            kv_heads, head_dim = self._head_dims
            blank = mx.zeros((1, kv_heads, prompt.tokens, head_dim))
            cache.update_and_fetch(blank, blank)
        else:
            cache.offset += prompt.tokens
        return cache.keys, cache.values


def _parts(
    caches: Sequence[Cache],
) -> tuple[Sequence[SlabKv], list[tuple[PackedPrompt, ...]]]:
    """Return the rows' caches, one a layer or none, and each prompt's."""
    if not isinstance(caches[0], PackedCache):
        return caches, []
    rows = [one.rows for one in caches] if caches[0].rows is not None else []
    return rows, list(zip(*(one.prompts for one in caches), strict=True))


def _in_slab_order(x: mx.array, slabs: Sequence[SlabRows]) -> mx.array:
    """Put rows slab by slab; what is behind them stays there."""
    if all(slab.index is None for slab in slabs):
        return x
    count = sum(slab.rows for slab in slabs)
    return mx.concatenate([*(slab.of(x) for slab in slabs), x[count:]])


def _in_row_order(x: mx.array, slabs: Sequence[SlabRows], rows: Sequence[SlabKv]) -> mx.array:
    """Undo :func:`_in_slab_order`."""
    if all(slab.index is None for slab in slabs):
        return x
    count = sum(slab.rows for slab in slabs)
    return mx.concatenate([rows[0].in_row_order([x[:count]]), x[count:]])


def _turned(pairs: Sequence[Sequence[mx.array]]) -> tuple[list[mx.array], list[mx.array]]:
    """Turn keys and values of each layer into the layers' keys and the layers' values."""
    return [one[0] for one in pairs], [one[1] for one in pairs]


def _takes_columns(cache: Cache) -> bool:
    if isinstance(cache, SlabKv):
        return cache.takes_columns()
    if not isinstance(cache, PackedCache):
        return False
    from mlx_lm.models.cache import KVCache  # noqa: PLC0415 - after import_mlx_lm()

    are_plain = all(type(one.cache) is KVCache for one in cache.prompts)
    return are_plain and (cache.rows is None or cache.rows.takes_columns())


class _InOne:
    """Marks the classes of models whose layers are computed in one operation."""

    __slots__ = ()
    former: type[Layer]


def compute_layers_in_one(model: LanguageModel) -> None:
    """Have a llama's layers computed in one operation where machd's kernels compute every part of each of them.

    The model keeps its weights and gets a subclass of its own class, for passes that :meth:`NativeLayers.take`; another
    one each time, of the layers that it has then.
    """
    body = model.model
    blocks = [_native_block(block) for block in body.layers]
    if None in blocks:
        return
    layers = NativeLayers(blocks, body.layers[0].self_attn)
    former = body.former if isinstance(body, _InOne) else type(body)

    def call(
        self: Layer,
        inputs: mx.array,
        cache: Sequence[Cache] | None = None,
        input_embeddings: mx.array | None = None,
    ) -> mx.array:
        if cache is None or not layers.take(cache):
            hidden: mx.array = former.__call__(self, inputs, cache, input_embeddings)
            return hidden
        x = self.embed_tokens(inputs) if input_embeddings is None else input_embeddings
        normed: mx.array = self.norm(layers(x, cache))
        return normed

    members = {"__call__": call, "former": former}
    body.__class__ = type(f"Native{former.__name__}", (former, _InOne), members)


def _native_block(block: Layer) -> object | None:
    """Make the kernels' block of a llama's; None where a part is not theirs, or a window hides tokens."""
    from mlx_lm.models import llama  # noqa: PLC0415 - after import_mlx_lm()

    if class_of(block) is not llama.TransformerBlock or block.use_sliding:
        return None
    attention, mlp = block.self_attn, block.mlp
    norms = block.input_layernorm, block.post_attention_layernorm
    is_ours = isinstance(attention, NativeAttention) and isinstance(mlp, NativeFeedForward)
    if not (is_ours and all(map(is_native_norm, norms))):
        return None
    layers = (attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj)
    weights = [layer_weights(layer) for layer in layers]
    if None in weights or attention.head_dim % HEAD_NUMBERS:
        return None
    made: object = native_kernels().LlamaBlock(
        input_norm=norms[0].weight,
        post_norm=norms[1].weight,
        input_eps=norms[0].eps,
        post_eps=norms[1].eps,
        **dict(zip(("qkv", "output", "gate_up", "down"), weights, strict=True)),
        heads=attention.heads,
        kv_heads=attention.kv_heads,
        scale=attention.scale,
    )
    return made
