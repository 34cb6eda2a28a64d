"""Rows of recurrent state: join and leave in the arrays of mlx-lm's ``ArraysCache``, [rows, ...] each.

A model puts new arrays into the cache in every pass, as long as there are rows, so there are no places to
spare. A row that leaves costs the copy of the row that takes its place. A row that joins costs a copy of the
state, which a pass itself reads and writes several times over.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from machd.engine.backend.untyped import Cache


def append_state(batch: Cache, row: Cache) -> None:
    """Add a row after the others.

    Args:
        batch: The ``ArraysCache`` of the rows that are there.
        row: That of the row.
    """
    _widen_histories(batch, row)
    batch.extend(row)


def keep_states(batch: Cache, order: Sequence[int]) -> None:
    """Keep the rows of ``order``, in that order; only rows that change their place are copied."""
    held = [array for array in batch.cache if array is not None]
    moving = [(place, row) for place, row in enumerate(order) if place != row]
    copies = [[mx.contiguous(array[row : row + 1]) for _, row in moving] for array in held]
    # Or each array would be copied when it is written, to keep what they read.
    mx.eval(copies)
    for array, rows in zip(held, copies, strict=True):
        for (place, _), one in zip(moving, rows, strict=True):
            array[place : place + 1] = one
    batch.cache = [None if array is None else array[: len(order)] for array in batch.cache]
    rows_kept = mx.array(list(order), dtype=mx.int32)
    if batch.left_padding is not None:
        batch.left_padding = batch.left_padding[rows_kept]
    if batch.lengths is not None:
        batch.lengths = batch.lengths[rows_kept]


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
