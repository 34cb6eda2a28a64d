"""The KV of the rows that share a forward pass: slabs, and mlx-lm's batch caches for the rest.

Standard caches become a :class:`~machd.engine.kv.layers.slab.SlabCache` a layer, in their KV format, and windows a
:class:`~machd.engine.kv.layers.window.WindowSlab`. Recurrent state stays in mlx-lm's own arrays, which the
model makes anew in every pass: :mod:`machd.engine.kv.layers.state`. Lists of caches are opened, and their inner
caches treated so.

Rows that share a prefix read one copy of it, made of the caches of the first that joins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import mlx.core as mx

from machd.engine.backend.untyped import Cache
from machd.engine.kv.kv_format import PLAIN, KvFormat
from machd.engine.kv.lane_kv import LaneKv, PrefilledRow, held_bytes
from machd.engine.kv.layers import state
from machd.engine.kv.layers.slab import SlabCache
from machd.engine.kv.layers.window import WindowSlab
from machd.engine.kv.rollback import CacheCheckpoint, supports_rollback
from machd.engine.kv.row_caches import (
    format_of,
    innermost,
    is_cache_list,
    kv_arrays,
    window_arrays,
)
from machd.engine.kv.row_positions import JoiningRow, RowPositions
from machd.engine.kv.slab_layout import LayoutRule, LengthClasses, OneSlab


class BatchLaneKv(LaneKv):
    """A lane of any number of rows that are computed together."""

    def __init__(self, max_rows: int, *, has_length_classes: bool = False) -> None:
        """Begin without rows.

        Args:
            max_rows: Most rows that there will ever be.
            has_length_classes: The model's attention reads slab by slab, so rows may lie in several.
        """
        self._rule: LayoutRule = LengthClasses() if has_length_classes else OneSlab(max_rows)
        self._max_rows = max_rows
        self._checkpoint: CacheCheckpoint | None = None
        self._checkpoint_lengths: list[int] = []
        self._padded: list[Cache] = []
        self._positions = RowPositions(self._rule)
        self.layers: list[Cache] = []
        self._slabs: list[SlabCache] = []
        self._windows: list[WindowSlab] = []
        self._merged: list[Cache] = []

    @property
    def takes_ragged_spans(self) -> bool:
        """True if all caches are slabs of whole rows: a row's padding lands after its end there."""
        return not (self._merged or self._windows)

    @property
    def can_roll_back(self) -> bool:
        """True if every cache that is no slab is of a class with a known rollback; windows with one row alone.

        Rings could do it for several rows. The rules promise less than that, and no probe has measured it.
        """
        if self._windows and len(self._positions.lengths) > 1:
            return False
        return all(supports_rollback(cache) for cache in self._merged)

    @property
    def room_tokens(self) -> int:
        """Room within the slabs or within what rows have reserved."""
        return self._positions.room_tokens()

    def join(self, row: PrefilledRow) -> None:
        """Copy a row in, layer by layer."""
        place = len(self._positions.lengths)
        prefix: list[tuple[mx.array, ...]] | None = None
        if row.shared is not None and row.shared not in self._positions.shared:
            assert isinstance(self._rule, LengthClasses), "attention reads what comes before a slab"
            prefix = _copies_without_nan(row, row.shared.tokens)
            # A NaN of one row must not come into others. The row will fail, with columns of its own.
            row = row if prefix else replace(row, shared=None)
        self._positions.append(row.length, row.limit, row.shared)
        batched = self.layers or [None] * len(row.layers)
        self.layers = [
            self._joined(batch, single, place, row)
            for batch, single in zip(batched, row.layers, strict=True)
        ]
        every = innermost(self.layers)
        self._slabs = [cache for cache in every if isinstance(cache, SlabCache)]
        self._windows = [cache for cache in every if isinstance(cache, WindowSlab)]
        self._merged = [cache for cache in every if not isinstance(cache, SlabCache | WindowSlab)]
        if row.shared is not None and prefix is not None:
            for slab, arrays in zip(self._slabs, prefix, strict=True):
                slab.hold_prefix(row.shared.number, arrays)

    def keep(self, order: Sequence[int]) -> None:
        """Keep the rows of ``order``, in that order."""
        self._positions.keep(order)
        for cache in self.layers:
            self._keep(cache, list(order))

    def clear(self) -> None:
        """Drop the batch."""
        self._positions = RowPositions(self._rule)
        self.layers, self._slabs, self._windows, self._merged = [], [], [], []
        self._checkpoint = None

    def open_pass(self, lengths: Sequence[int] | None = None) -> None:
        """Begin a forward pass; caches that are no slabs are told each row's length without padding."""
        self._positions.open_pass(lengths)
        for window in self._windows:
            if window.grow_ahead():
                break  # the next layer's turn is the next pass
        self._padded = self._merged if lengths is not None and len(set(lengths)) > 1 else []
        for cache in self._padded:
            cache.prepare(lengths=list(lengths or ()))

    def close_pass(self) -> None:
        """Drop the padding of the pass from the caches that were told of it."""
        for cache in self._padded:
            cache.finalize()

    def checkpoint(self) -> None:
        """Remember each row's length, and the state of all caches that are no slabs."""
        assert self.can_roll_back, "there is a way back"
        self._checkpoint_lengths = list(self._positions.lengths)
        self._checkpoint = CacheCheckpoint(self._merged)

    def roll_back(self, counts: Sequence[int]) -> bool:
        """Remove each row's last positions; not done where there is recurrent state."""
        checkpoint, self._checkpoint = self._checkpoint, None
        assert checkpoint is not None, "there is a checkpoint"
        lengths = zip(self._positions.lengths, self._checkpoint_lengths, strict=True)
        added = [new - old for new, old in lengths]
        is_done = checkpoint.roll_back(counts, added)
        if not is_done or any(counts):
            self._positions.cut(counts if is_done else added)
        return is_done

    def wipe(self, row: int, begin: int = 0) -> None:
        """Zero a row's own keys and values from a position on."""
        for slab in self._slabs:
            slab.wipe(row, begin)
        for window in self._windows:
            window.wipe(row, begin)

    def growth_bytes(self, joining: Sequence[JoiningRow], tokens: int, bytes_per_token: int) -> int:
        """Growth of the slabs and windows, and a copy of all other caches if a row joins.

        What rows leave is freed once they are copied, a layer at a time.
        """
        other_bytes = held_bytes(self._merged) if joining else 0
        for window in self._windows:
            grown_bytes = window.growth_bytes(joining, tokens)
            other_bytes += max(0, grown_bytes - window.nbytes)
        # A layer grows ahead of need, while the arrays of another one are being copied.
        other_bytes += 2 * max((window.nbytes for window in self._windows), default=0)
        before, after = self._positions.layout, self._positions.after(joining, tokens)
        if before == after:
            return other_bytes
        slab_bytes = held_bytes(self._slabs)
        columns = sum(slab.places * slab.columns for slab in after)
        shared = {one.shared for one in joining if one.shared is not None}
        columns += sum(
            one.tokens for one in shared.union(self._positions.shared) if one is not None
        )
        layers = max(len(self._slabs) + len(self._windows) + len(self._merged), 1)
        return max(0, columns * bytes_per_token - slab_bytes) + slab_bytes // layers + other_bytes

    def _joined(self, batch: Cache, single: Cache, place: int, row: PrefilledRow) -> Cache:
        from mlx_lm.models.cache import (  # noqa: PLC0415 - after import_mlx_lm()
            ArraysCache,
            CacheList,
            RotatingKVCache,
        )

        if isinstance(single, CacheList):
            inner = batch.caches if batch is not None else [None] * len(single.caches)
            pairs = zip(inner, single.caches, strict=True)
            return CacheList(*(self._joined(b, s, place, row) for b, s in pairs))
        base = self._positions.base(place)
        arrays = kv_arrays(single, row.index, base)
        if arrays is not None:
            if batch is None:
                batch = SlabCache(self._positions, format_of(single))
            # Without positions there need not be arrays yet, and a layer may never have any.
            filled = arrays if row.length else ()
            batch.place(place, [array[:, :, : row.length - base] for array in filled])
            return batch
        if type(single) is RotatingKVCache:
            if batch is None:
                batch = WindowSlab(self._positions, single.max_size, self._max_rows)
            batch.place(place, window_arrays(single))
            return batch
        merged = single.merge([single])
        if batch is None:
            return merged
        if type(merged) is ArraysCache:
            state.append_state(batch, merged)
        else:
            batch.extend(merged)
        return batch

    def _keep(self, cache: Cache, order: list[int]) -> None:
        from mlx_lm.models.cache import ArraysCache  # noqa: PLC0415 - after import_mlx_lm()

        if isinstance(cache, SlabCache):
            cache.keep()
        elif isinstance(cache, WindowSlab):
            cache.keep(order)
        elif type(cache) is ArraysCache:
            state.keep_states(cache, order)
        elif is_cache_list(cache):
            for inner in cache.caches:
                self._keep(inner, order)
        else:
            cache.filter(order)


def _copies_without_nan(row: PrefilledRow, tokens: int) -> list[tuple[mx.array, ...]] | None:
    """Copy a row's first positions, and wait for it.

    Returns:
        For each cache its arrays [1, heads, tokens, n]; None if there is a NaN in one.
    """
    copies = [
        tuple(mx.contiguous(array[:, :, :tokens]) for array in kv_arrays(cache, row.index) or ())
        for cache in innermost(row.layers)
    ]
    has_nan = mx.any(mx.stack([mx.isnan(array).any() for arrays in copies for array in arrays]))
    mx.eval(copies)  # or they would keep the row's own caches alive
    return None if has_nan.item() else copies


def padded_caches(
    prompts: Sequence[Sequence[int]], layer_count: int, kv_format: KvFormat = PLAIN
) -> tuple[list[Cache], mx.array]:
    """Make caches and padded tokens to compute whole prompts of a standard model in one call.

    Rows start at position 0 and are padded at their ends, where causal attention cannot see it; the
    padding's columns lie after the row's end.

    Args:
        prompts: Token ids of each row, at least one.
        layer_count: Caches that the model takes.
        kv_format: Storage of keys and values.

    Returns:
        One cache a layer, opened for the pass, and token ids int32 [rows, longest].
    """
    positions = RowPositions(OneSlab(len(prompts)))
    lengths = [len(prompt) for prompt in prompts]
    for length in lengths:
        positions.append(0, length)
    positions.open_pass(lengths)
    longest = max(lengths)
    padded = [[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts]
    caches: list[Cache] = [SlabCache(positions, kv_format) for _ in range(layer_count)]
    return caches, mx.array(padded, dtype=mx.int32)
