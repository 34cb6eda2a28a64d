"""Sizes of the arrays that hold a batch's keys and values.

The scheduler reserves and the engine allocates by these rules, so that what is reserved is enough.
"""

from __future__ import annotations

from collections.abc import Iterable

COLUMN_STEP = 256
"""Columns of a row's keys and values are allocated in multiples of this, as in mlx-lm's caches."""

CROWDED_COLUMNS = 2048
"""Columns up to which rows of one length class share an array."""


def slab_rows(rows: int, max_rows: int) -> int:
    """Return the rows that an array of all rows has room for when it holds ``rows``: a power of two."""
    return min(1 << max(rows - 1, 0).bit_length(), max(max_rows, rows))


def class_columns(tokens: int) -> int:
    """Return the columns of the length class of a row with so many positions.

    The classes are 256, 384, 512, 768, 1024 and so on, so that a row of 171 positions or more has at most 1.5
    times as many columns.
    """
    power = max(COLUMN_STEP, 1 << max(tokens - 1, 0).bit_length())
    smaller = power // 4 * 3
    return smaller if power > COLUMN_STEP and tokens <= smaller else power


def reserved_columns(limits: Iterable[int]) -> int:
    """Return the columns that rows in length classes may come to take, each with its limit of positions."""
    return sum(
        class_columns(limit) if limit <= CROWDED_COLUMNS else -(-limit // COLUMN_STEP) * COLUMN_STEP
        for limit in limits
    )
