"""Recurrent state of a batch, in the arrays [rows, ...] of mlx-lm's ``ArraysCache``.

A model puts new arrays into the cache in every pass, as long as there are rows, so there are no places to
spare. A row that leaves costs the copy of the row that takes its place. A row that joins costs a copy of the
state, which a pass itself reads and writes several times over.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import ClassVar

import mlx.core as mx

from machd.engine.backend.untyped import Cache
from machd.engine.kv.layers.cache_state import CacheState, copied, move_rows
from machd.engine.kv.layers.merged import MergedKv


class StateKv(MergedKv):
    """One layer's recurrent state, rolled back whole for all rows.

    A MergedKv, because the model writes into mlx-lm's ``ArraysCache``; machd only moves its rows and rolls it back.
    """

    max_rolled_back_rows: ClassVar[float] = inf

    @staticmethod
    def row_state(cache: Cache, row: int) -> CacheState:
        """Copy the state of one row."""
        rows = [None if one is None else one[row : row + 1] for one in cache.cache]
        return copied((rows, None, None))

    def select(self, order: Sequence[int]) -> None:
        """Keep the rows of ``order``, in that order; only rows that change their place are copied."""
        batch = self.model_cache
        move_rows([array for array in batch.cache if array is not None], order)
        batch.cache = [None if array is None else array[: len(order)] for array in batch.cache]
        rows_kept = mx.array(list(order), dtype=mx.int32)
        if batch.left_padding is not None:
            batch.left_padding = batch.left_padding[rows_kept]
        if batch.lengths is not None:
            batch.lengths = batch.lengths[rows_kept]

    def _extend(self, row: Cache) -> None:
        _widen_histories(self.model_cache, row)
        super()._extend(row)


def _widen_histories(batch: Cache, row: Cache) -> None:
    """Pad the token histories of two states to one width.

    A row that is younger than the history is long has fewer tokens. Models that look back at token ids
    read 0 before a text, so zeros on the left change nothing.
    """
    for index, (ours, theirs) in enumerate(zip(batch.cache, row.cache, strict=True)):
        if ours is None or theirs is None or not mx.issubdtype(ours.dtype, mx.integer):
            continue  # mlx-lm makes zeros for a row without state
        width = max(ours.shape[-1], theirs.shape[-1])
        for cache, tokens in ((batch, ours), (row, theirs)):  # [rows, tokens]
            missing = width - tokens.shape[-1]
            cache[index] = mx.pad(tokens, [(0, 0), (missing, 0)]) if missing else tokens
