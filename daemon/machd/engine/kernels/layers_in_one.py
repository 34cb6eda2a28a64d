"""All layers of a model in one operation of machd's own kernels, where these compute every part of each layer.

A step's small operations take as long as its products. What a row's token sees, and every sum, is the same as in the operations one
after another, whatever rows and prompts are in the pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import mlx.core as mx

from machd.engine.backend.native_kernels import native_kernels
from machd.engine.backend.untyped import Cache, LanguageModel, Layer
from machd.engine.kernels.native_blocks import (
    Body,
    RotationTables,
    body_of,
    heads_of,
    layers_of_block,
)
from machd.engine.kernels.native_layers import lay_in_large_pages
from machd.engine.kernels.packed import PackedCache
from machd.engine.kernels.pass_adapters import current_adapters
from machd.engine.kernels.started_layers import class_of
from machd.engine.kv.layers.slab import SlabKv
from machd.engine.kv.layers.window import WindowKv
from machd.engine.kv.row_positions import SlabRows

_IN_ORDER = (0, 0)
"""The ring of columns that lie in order of position: none."""


class HeldColumns(NamedTuple):
    """Some rows' keys and values in one layer, with room for the pass's tokens.

    Attributes:
        keys: [places, kv_heads, columns, head_dim].
        values: The same.
        ring: Columns of the ring, and the column of position 0 there; see ``LlamaLayers.Columns``.
        keep: Takes the arrays with the pass's tokens.
    """

    keys: mx.array
    values: mx.array
    ring: tuple[int, int]
    keep: Callable[[mx.array, mx.array], None]


class _Rows(NamedTuple):
    """Rows of a pass that lie together: their columns in each layer.

    Attributes:
        layers: One a layer.
        starts: int32 [rows], columns before the pass.
        tokens: Of each row.
        prefixes: Keys and values that the rows share, of each layer or none.
    """

    layers: Sequence[HeldColumns]
    starts: mx.array
    tokens: int
    prefixes: Sequence[Sequence[mx.array]] = ()


class LayersInOne:
    """All layers of a model in one operation."""

    def __init__(
        self, blocks: Sequence[object], tables: RotationTables, kv_shape: tuple[int, int]
    ) -> None:
        """Take blocks, the tables that they name, and the heads of keys and their numbers."""
        native = native_kernels()
        self._in_one = native.LlamaLayers(blocks)
        self._count = len(blocks)
        self._columns = native.LlamaLayers.Columns
        self._tables = tables.tables
        self._kv_shape = kv_shape

    def take(self, caches: Sequence[Cache]) -> bool:
        """Return True for a pass of rows, and of prompts beside them, that are stored as they are.

        A model that has fewer layers than when it was taken has fewer caches, and computes layer by layer.
        """
        adapters = current_adapters()
        if adapters is not None and adapters.in_one is None:
            return False  # the layers compute them one by one
        return len(caches) == self._count and all(map(_takes_columns, caches))

    def __call__(self, x: mx.array, caches: Sequence[Cache]) -> mx.array:
        """Compute [rows, tokens, hidden] as mlx-lm's layers do one after another.

        Args:
            x: The rows of slabs, and behind them the tokens of prompts, rows of one token each.
            caches: One a layer, which :meth:`take` has looked at.
        """
        rows, tokens, _ = x.shape
        if isinstance(caches[0], (SlabKv, WindowKv)):
            return self._batch(x, caches, caches)
        if isinstance(caches[0], PackedCache):
            held = [one.rows for one in caches] if caches[0].rows is not None else []
            return self._batch(x, held, caches)
        start = caches[0].offset
        layers = [_with_room(cache, self._blank(rows, tokens)) for cache in caches]
        own = _Rows(layers, mx.array([start] * rows, dtype=mx.int32), tokens)
        return self._computed(x, [own], start + tokens)

    def _batch(
        self, x: mx.array, rows: Sequence[SlabKv | WindowKv], caches: Sequence[Cache]
    ) -> mx.array:
        """Compute the rows of a batch, none or in one cache a layer, and the prompts that ``caches`` have beside them."""
        by_slab = list(zip(*(self._slabs(one) for one in rows), strict=True))
        slabs = [layers[0][0] for layers in by_slab]
        parts = [
            _Rows([held for _, held in layers], slab.start, x.shape[1], _prefixes(rows, slab))
            for slab, layers in zip(slabs, by_slab, strict=True)
        ]
        if isinstance(caches[0], PackedCache):
            for prompt in zip(*(one.prompts for one in caches), strict=True):
                blank = self._blank(1, prompt[0].tokens)
                layers = [_with_room(one.cache, blank) for one in prompt]
                parts.append(_Rows(layers, prompt[0].start, prompt[0].tokens))
        computed = self._computed(
            _in_slab_order(x, slabs), parts, caches[0].width, partial(_in_slab_order, slabs=slabs)
        )
        return _in_row_order(computed, slabs, rows)

    def _computed(
        self,
        x: mx.array,
        parts: Sequence[_Rows],
        end: int,
        ordered: Callable[[mx.array], mx.array] = lambda rows: rows,
    ) -> mx.array:
        """Compute a pass whose positions are all before ``end``, with the adapters of its rows, which are ``ordered`` as the rows of ``x``."""
        tables = [table.up_to(end) for table in self._tables]
        arguments: list[object] = [x, tables, [self._seen(one) for one in parts]]
        adapters = current_adapters()
        if adapters is not None and adapters.in_one is not None:
            index = ordered(adapters.in_one.index)
            assert index.shape[0] == x.shape[0], "each row has an index"
            arguments += [mx.repeat(index, x.shape[1]), adapters.in_one.adapters]
        x, *written = self._in_one(*arguments)
        pairs = iter(zip(written[::2], written[1::2], strict=True))
        for one in parts:
            for layer, pair in zip(one.layers, pairs, strict=False):
                layer.keep(*pair)
        return x

    def _seen(self, rows: _Rows) -> object:
        rings = [layer.ring for layer in rows.layers]
        return self._columns(
            [layer.keys for layer in rows.layers],
            [layer.values for layer in rows.layers],
            rows.starts,
            rows.tokens,
            [prefix[0] for prefix in rows.prefixes],
            [prefix[1] for prefix in rows.prefixes],
            rings if any(ring != _IN_ORDER for ring in rings) else [],
        )

    def _slabs(self, cache: SlabKv | WindowKv) -> Sequence[tuple[SlabRows, HeldColumns]]:
        """Return the rows of each slab of a batch's layer, with their columns."""
        if isinstance(cache, WindowKv):
            rows, (keys, values), period = cache.ring_to_write(self._kv_shape)
            return [(rows, HeldColumns(keys, values, (period, 0), cache.hold))]
        return [
            (rows, HeldColumns(arrays[0], arrays[1], _IN_ORDER, partial(_put, arrays)))
            for rows, arrays in cache.slabs_to_write(self._kv_shape)
        ]

    def _blank(self, rows: int, tokens: int) -> mx.array:
        heads, head_dim = self._kv_shape
        return mx.zeros((rows, heads, tokens, head_dim))


def compute_layers_in_one(model: LanguageModel) -> None:
    """Have a model's layers computed in one operation where machd's kernels compute every part of each of them.

    The model keeps its weights and gets a subclass of its own class, for passes that :meth:`LayersInOne.take`; another
    one each time, of the layers that it has then.
    """
    body: Layer = getattr(model, "model", None)
    former = body.former if isinstance(body, _InOne) else type(body)
    form = body_of(former)
    if form is None or any(class_of(layer) is not form.layer for layer in body.layers):
        return
    lay_in_large_pages(body)  # before what keeps the weights as they lie
    tables = RotationTables()
    blocks = [form.block(body, layer, tables) for layer in body.layers]
    norm = form.norm(body)
    if None in blocks or norm is None:
        return
    layers = LayersInOne(blocks, tables, heads_of(body.layers[0].self_attn)[1:])
    body.__class__ = _in_one_class(former, form, layers, norm)


def layers_of_blocks(model: LanguageModel) -> Sequence[Sequence[Layer]] | None:
    """Return the layers whose weights each block of a model in one operation has, in its order; None where layers are not in one."""
    body: Layer = getattr(model, "model", None)
    return list(map(layers_of_block, body.layers)) if isinstance(body, _InOne) else None


def _in_one_class(
    former: type[Layer], form: Body, layers: LayersInOne, norm: tuple[mx.array, float]
) -> type[Layer]:
    def call(
        self: Layer,
        inputs: mx.array,
        cache: Sequence[Cache] | None = None,
        input_embeddings: mx.array | None = None,
    ) -> mx.array:
        if cache is None or not layers.take(cache):
            hidden: mx.array = former.__call__(self, inputs, cache, input_embeddings)
            return hidden
        embedded = self.embed_tokens(inputs) if input_embeddings is None else input_embeddings
        normed: mx.array = native_kernels().rms_norm(
            layers(form.scaled(self, embedded), cache), *norm
        )
        return normed

    members = {"__call__": call, "former": former}
    return type(f"Native{former.__name__}", (former, _InOne), members)


class _InOne:
    """Marks the classes of models whose layers are computed in one operation."""

    __slots__ = ()
    former: type[Layer]


def _takes_columns(cache: Cache) -> bool:
    if isinstance(cache, SlabKv):
        return cache.takes_columns()
    if isinstance(cache, PackedCache):
        takes_rows = cache.rows is None or cache.rows.takes_columns()
        return takes_rows and all(_is_of_mlx_lm(one.cache) for one in cache.prompts)
    return isinstance(cache, WindowKv) or _is_of_mlx_lm(cache)


def _is_of_mlx_lm(cache: Cache) -> bool:
    from mlx_lm.models.cache import KVCache, RotatingKVCache  # noqa: PLC0415 - after import_mlx_lm()

    return type(cache) is KVCache or (type(cache) is RotatingKVCache and cache.keep == 0)


def _with_room(cache: Cache, blank: mx.array) -> HeldColumns:
    """Count a pass's tokens in a cache of mlx-lm's own, and return its columns with room for them."""
    tokens, columns = blank.shape[2], 0 if cache.keys is None else cache.keys.shape[2]
    is_window = hasattr(cache, "max_size")
    if not is_window and cache.offset + tokens <= columns:
        cache.offset += tokens
    elif is_window and tokens == 1 and _has_room(cache, columns):
        cache._idx = cache._idx % cache.max_size + 1  # noqa: SLF001 - mlx-lm's, as its own code moves it
        cache.offset += 1
    else:
        cache.update_and_fetch(blank, blank)
    ring = _IN_ORDER
    if is_window:
        columns = cache.keys.shape[2]
        ring = columns, (cache._idx - cache.offset) % columns  # noqa: SLF001
    return HeldColumns(cache.keys, cache.values, ring, partial(_hold, cache))


def _has_room(cache: Cache, columns: int) -> bool:
    """Return True if mlx-lm's window would write its next token without growing, and without cutting columns off."""
    return columns == cache.max_size or bool(cache.offset < columns < cache.max_size)


def _hold(cache: Cache, keys: mx.array, values: mx.array) -> None:
    cache.keys, cache.values = keys, values


def _put(arrays: list[mx.array], keys: mx.array, values: mx.array) -> None:
    arrays[:] = keys, values


def _prefixes(rows: Sequence[SlabKv | WindowKv], slab: SlabRows) -> Sequence[Sequence[mx.array]]:
    """Return what a slab's rows share, of each layer; nothing where they share nothing."""
    prefixes = [one.prefix(slab) for one in rows if isinstance(one, SlabKv)]
    return [prefix for prefix in prefixes if prefix is not None]


def _in_slab_order(x: mx.array, slabs: Sequence[SlabRows]) -> mx.array:
    """Put rows slab by slab; what is behind them stays there."""
    if all(slab.index is None for slab in slabs):
        return x
    count = sum(slab.rows for slab in slabs)
    return mx.concatenate([*(slab.of(x) for slab in slabs), x[count:]])


def _in_row_order(
    x: mx.array, slabs: Sequence[SlabRows], rows: Sequence[SlabKv | WindowKv]
) -> mx.array:
    """Undo :func:`_in_slab_order`."""
    if all(slab.index is None for slab in slabs):
        return x
    count = sum(slab.rows for slab in slabs)
    first = rows[0]
    assert isinstance(first, SlabKv), "windows lie in the order of rows"
    return mx.concatenate([first.in_row_order([x[:count]]), x[count:]])
