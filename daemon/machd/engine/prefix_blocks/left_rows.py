"""Rows that left their lane by themselves, for as long as nobody has freed their slots.

Looking ahead, a row leaves as soon as its last token is chosen, before anybody has seen that token.
What it has computed is copied out, so that blocks can still be made of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import mlx.core as mx

from machd.engine.backend.untyped import Cache
from machd.engine.kv.row_planes import StandingRow
from machd.engine.prefix_blocks.arrays import copy_of_row, fill_caches


class LeftRows:
    """Copies of rows, by slot."""

    def __init__(self, make_caches: Callable[[], list[Cache]]) -> None:
        """Begin without rows; ``make_caches`` makes empty ones of one row."""
        self._make_caches = make_caches
        self._rows: dict[int, StandingRow] = {}

    @property
    def nbytes(self) -> int:
        """What the copies take."""
        return sum(int(cache.nbytes) for row in self._rows.values() for cache in row.caches)

    def take(self, slot_index: int, row: StandingRow) -> None:
        """Copy a row that is about to leave; the device does so before it computes the next pass."""
        if not row.length:
            return
        copy = copy_of_row(row, 0, row.length, has_state=True)
        mx.async_eval(copy.arrays)
        caches = self._make_caches()
        fill_caches(caches, [copy], row.length)
        self._rows[slot_index] = StandingRow(caches, 0, row.length, is_exact=True)

    def find(self, slot_index: int) -> StandingRow | None:
        """A slot's row; None unless it has left by itself."""
        return self._rows.get(slot_index)

    def forget(self, slot_indices: Iterable[int]) -> None:
        """Drop what there is of these slots."""
        for slot_index in slot_indices:
            self._rows.pop(slot_index, None)

    def clear(self) -> None:
        """Drop all."""
        self._rows.clear()
