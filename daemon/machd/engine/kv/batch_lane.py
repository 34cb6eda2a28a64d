"""The caches of a decoding batch: rows come and go, each layer in the form its model expects.

Standard caches become a :class:`~machd.engine.kv.slab.SlabCache`, in the format that they are in. Rotating caches and recurrent state
become mlx-lm's own batch caches, which copy the whole batch when a row joins or leaves. Lists of
caches are opened and treated inside.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from machd.engine.backend.untyped import Cache
from machd.engine.kv.formats import PLAIN
from machd.engine.kv.kv_format import KvFormat
from machd.engine.kv.lane_kv import PrefilledRow, held_bytes
from machd.engine.kv.rollback import CacheCheckpoint, supports_rollback, unroll_window
from machd.engine.kv.row_caches import format_of, innermost, kv_arrays
from machd.engine.kv.row_positions import RowPositions
from machd.engine.kv.slab import SlabCache


class BatchLaneKv:
    """Any number of rows, computed together."""

    def __init__(self, max_rows: int) -> None:
        """Begin without rows; ``max_rows`` is the most there can ever be."""
        self._max_rows = max_rows
        self._positions = RowPositions()
        self._layers: list[Cache] = []
        self._checkpoint: CacheCheckpoint | None = None
        self._checkpoint_lengths: list[int] = []
        self._padded: list[Cache] = []

    @property
    def layers(self) -> list[Cache]:
        """One batch cache for each cache of the model."""
        return self._layers

    @property
    def nbytes(self) -> int:
        """Bytes held, room to spare included."""
        return held_bytes(self._layers)

    @property
    def takes_ragged_spans(self) -> bool:
        """Whether every layer has standard caches: what pads a row lies behind its end there."""
        return not self._others

    @property
    def can_roll_back(self) -> bool:
        """Whether the rows can be brought back, in every layer that has no standard cache."""
        rows = len(self._positions.lengths)
        return all(supports_rollback(cache, rows) for cache in self._others)

    def checkpoint(self) -> None:
        """Remember where the rows are."""
        assert self.can_roll_back, "there is a way back"
        self._checkpoint_lengths = list(self._positions.lengths)
        for cache in self._others:
            unroll_window(cache, self._checkpoint_lengths[0])
        self._checkpoint = CacheCheckpoint(self._others)

    def roll_back(self, counts: Sequence[int]) -> bool:
        """Take each row's last positions out again; not done where there is recurrent state."""
        checkpoint, self._checkpoint = self._checkpoint, None
        assert checkpoint is not None, "there is a checkpoint"
        marked = self._checkpoint_lengths
        added = [one - old for one, old in zip(self._positions.lengths, marked, strict=True)]
        is_done = checkpoint.roll_back(counts, added)
        if not is_done or any(counts):
            self._positions.cut(counts if is_done else added)
        return is_done

    def open_step(self, lengths: Sequence[int] | None = None) -> None:
        """Begin a forward pass; recurrent state is told how much of each row is no padding."""
        self._positions.open_step(lengths)
        self._padded = []
        if lengths is not None and len(set(lengths)) > 1:
            self._padded = self._others
        for cache in self._padded:
            cache.prepare(lengths=list(lengths or ()))

    def close_step(self) -> None:
        """Forget what padded the pass that was dispatched."""
        for cache in self._padded:
            cache.finalize()

    def growth_bytes(
        self, joining: Sequence[tuple[int, int]], tokens: int, bytes_per_token: int
    ) -> int:
        """What slabs grow by, and a copy of all other caches where a row joins.

        A slab that is laid out anew stays until its positions are copied: one layer's at a time.
        """
        lengths = [*self._positions.lengths, *(length for length, _ in joining)]
        if not lengths:
            return 0
        limits = [*self._positions.limits, *(limit for _, limit in joining)]
        every = innermost(self._layers)
        slab = next((one for one in every if isinstance(one, SlabCache)), None)
        if slab is None:
            slab = SlabCache(self._positions, self._max_rows)
        rows, columns = slab.layout(len(lengths), max(lengths) + tokens, limits)
        slab_bytes = sum(one.nbytes for one in every if isinstance(one, SlabCache))
        grown_bytes = max(0, rows * columns * bytes_per_token - slab_bytes)
        if grown_bytes:
            grown_bytes += slab_bytes // max(len(every), 1)
        copied_bytes = held_bytes(self._others) if joining else 0
        return grown_bytes + copied_bytes

    def join(self, row: PrefilledRow) -> None:
        """Copy a row in, layer by layer; the copied layers are given back as it goes."""
        place = len(self._positions.lengths)
        self._positions.append(row.length, row.limit)
        joined = self._layers or [None] * len(row.layers)
        self._layers = [
            self._joined(batch, single, place, row)
            for batch, single in zip(joined, row.layers, strict=True)
        ]

    def keep(self, order: Sequence[int]) -> None:
        """Keep the rows of ``order``, in that order."""
        self._positions.keep(order)
        for cache in self._layers:
            self._keep(cache, list(order))

    def clear(self) -> None:
        """Drop the batch."""
        self._positions = RowPositions()
        self._layers = []
        self._checkpoint = None

    def wipe(self, row: int, begin: int = 0) -> None:
        """Zero a row's keys and values from a position on."""
        for cache in innermost(self._layers):
            if isinstance(cache, SlabCache):
                cache.wipe(row, begin)

    @property
    def _others(self) -> list[Cache]:
        """The innermost caches that are no slabs."""
        every = innermost(self._layers)
        return [cache for cache in every if not isinstance(cache, SlabCache)]

    def _joined(self, batch: Cache, single: Cache, place: int, row: PrefilledRow) -> Cache:
        from mlx_lm.models.cache import ArraysCache, CacheList  # noqa: PLC0415 - after import_mlx_lm()

        if isinstance(single, CacheList):
            inner = batch.caches if batch is not None else [None] * len(single.caches)
            pairs = zip(inner, single.caches, strict=True)
            return CacheList(*(self._joined(b, s, place, row) for b, s in pairs))
        arrays = kv_arrays(single)
        if arrays is not None:
            slab = batch
            if slab is None:
                slab = SlabCache(self._positions, self._max_rows, format_of(single))
            if row.length and arrays:
                one = slice(row.index, row.index + 1)
                slab.place(place, [array[one, :, : row.length] for array in arrays])
            else:
                # Without positions there need not be arrays yet, and a layer may never have any.
                slab.place_empty(place)
            return slab
        merged = single.merge([single])
        if batch is None:
            return merged
        if type(merged) is ArraysCache:
            _widen_histories(batch, merged)
        batch.extend(merged)
        return batch

    def _keep(self, cache: Cache, order: list[int]) -> None:
        if isinstance(cache, SlabCache):
            cache.keep(order, self._positions.lengths)
        elif _is_list(cache):
            for inner in cache.caches:
                self._keep(inner, order)
        else:
            cache.filter(order)


def _widen_histories(batch: Cache, row: Cache) -> None:
    """Bring the last tokens that two states remember to one width.

    A row that is younger than the history is long has fewer. What lies before a text is 0 to the
    models that look back at token ids, so zeros on the left change nothing.
    """
    for index, (ours, theirs) in enumerate(zip(batch.cache, row.cache, strict=True)):
        if ours is None or theirs is None or not mx.issubdtype(ours.dtype, mx.integer):
            continue  # of one that has no state yet, mlx-lm makes zeros
        width = max(ours.shape[-1], theirs.shape[-1])
        for cache, tokens in ((batch, ours), (row, theirs)):
            missing = width - tokens.shape[-1]
            cache[index] = mx.pad(tokens, [(0, 0), (missing, 0)]) if missing else tokens


def padded_caches(
    prompts: Sequence[Sequence[int]], layer_count: int, kv_format: KvFormat = PLAIN
) -> tuple[list[Cache], mx.array]:
    """Caches and padded tokens for computing whole prompts of a standard model in one call.

    Rows start at position 0 and are padded at their ends, where causal attention cannot see it;
    what the padding leaves in the cache lies behind the row's end.

    Args:
        prompts: Token ids of each row, at least one.
        layer_count: Caches that the model takes.
        kv_format: How they keep keys and values.

    Returns:
        One cache a layer, opened for the pass, and token ids int32 [rows, longest].
    """
    positions = RowPositions()
    lengths = [len(prompt) for prompt in prompts]
    for length in lengths:
        positions.append(0, length)
    positions.open_step(lengths)
    longest = max(lengths)
    padded = [[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts]
    caches: list[Cache] = [
        SlabCache(positions, len(prompts), kv_format) for _ in range(layer_count)
    ]
    return caches, mx.array(padded, dtype=mx.int32)


def _is_list(cache: Cache) -> bool:
    return type(cache).__name__ == "CacheList"
