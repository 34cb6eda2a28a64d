"""The positions of a batch's rows, and the masks that follow from them: one for all layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import mlx.core as mx

_GROUP_COLUMNS = 1536
"""Unused columns, over all rows, that cost as much to read as a call of its own: at 9 heads a column
takes about 0.1 us in a layer, and the operations of another call 0.15 ms."""


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Neighbouring rows of about one length.

    Attributes:
        begin: The first row.
        end: The row after the last.
        width: Columns that the longest of them has.
        mask: bool [rows, 1, 1, width], the columns that each sees; None for all.
    """

    begin: int
    end: int
    width: int
    mask: mx.array | None


class RowPositions:
    """The positions of each row of a batch, moved on once a step.

    Attributes:
        lengths: Positions that each row has, in row order; those of the running step included.
        limits: Positions that each row may ever have.
        step: Number of the running step.
        rows: int32 [rows], their places.
        start: int32 [rows], positions before the running step.
        end: int32 [rows], positions after it.
        tokens: Columns that the running step writes for each row, padding included.
        width: Columns that the step reads: up to the end of the longest row.
        shared_start: The start of all rows where it is the same; None where it differs.
    """

    def __init__(self) -> None:
        """Begin without rows."""
        self.lengths: list[int] = []
        self.limits: list[int] = []
        self.step = 0
        self.tokens = 0
        self.width = 0
        self.shared_start: int | None = None
        self.start = self.end = self.rows = mx.zeros((0,), dtype=mx.int32)
        self._is_changed = False
        self._masks: dict[tuple[int, int | None], mx.array] = {}
        self._groups: list[RowGroup] = []

    def append(self, length: int, limit: int) -> None:
        """Add a row that has ``length`` positions and may come to have ``limit``."""
        self.lengths.append(length)
        self.limits.append(limit)
        self._is_changed = True

    def keep(self, order: Sequence[int]) -> None:
        """Keep the rows of ``order``, in that order."""
        self.lengths = [self.lengths[row] for row in order]
        self.limits = [self.limits[row] for row in order]
        self._is_changed = True

    def cut(self, counts: Sequence[int]) -> None:
        """Remove so many of each row's last positions; their columns then lie after its end."""
        self.lengths = [one - count for one, count in zip(self.lengths, counts, strict=True)]
        self.end = _int32(self.lengths)

    def open_pass(self, lengths: Sequence[int] | None = None) -> None:
        """Begin a forward pass.

        Args:
            lengths: Tokens of each row's span, shorter ones padded to the longest; one each unless
                given.
        """
        self.step += 1
        self.tokens = 1 if lengths is None else max(lengths)
        first = self.lengths[0]
        self.shared_start = first if all(one == first for one in self.lengths) else None
        # The end of the last step is on the device already, unless rows have changed since.
        self.start = _int32(self.lengths) if self._is_changed else self.end
        if self._is_changed:
            self.rows = mx.arange(len(self.lengths), dtype=mx.int32)
        self._is_changed = False
        self.width = max(self.lengths) + self.tokens
        if lengths is None:
            self.end = self.start + 1
            self.lengths = [one + 1 for one in self.lengths]
        else:
            self.end = self.start + _int32(lengths)
            self.lengths = [one + new for one, new in zip(self.lengths, lengths, strict=True)]
        self._masks.clear()
        self._groups.clear()

    def row_groups(self) -> list[RowGroup]:
        """Divide the rows of a step of one token into groups of about one length.

        A group reads as many columns of each row as its longest has; another group costs a call of its
        own.
        """
        if not self._groups:
            ends = [0]
            for row in range(1, len(self.lengths)):
                begin, before = ends[-1], self.lengths[ends[-1] : row]
                together = (row + 1 - begin) * max(*before, self.lengths[row])
                if together > len(before) * max(before) + self.lengths[row] + _GROUP_COLUMNS:
                    ends.append(row)
            pairs = pairwise([*ends, len(self.lengths)])
            self._groups = [self._group(begin, end) for begin, end in pairs]
        return self._groups

    def _group(self, begin: int, end: int) -> RowGroup:
        lengths = self.lengths[begin:end]
        width = max(lengths)
        if min(lengths) == width:
            return RowGroup(begin, end, width, None)
        return RowGroup(begin, end, width, self.mask(None)[begin:end, ..., :width])

    def mask(self, window_tokens: int | None) -> mx.array:
        """Make the mask of the running step, or take the one made before.

        Returns:
            bool [rows, 1, tokens, width], the columns that each token sees.
        """
        key = (self.tokens, window_tokens)
        if key not in self._masks:
            columns = mx.arange(self.width, dtype=mx.int32)
            positions = self.start[:, None] + mx.arange(self.tokens, dtype=mx.int32)
            own = positions[:, None, :, None]  # [rows, 1, tokens, 1]
            mask = columns <= own  # [rows, 1, tokens, width]
            if window_tokens is not None:
                mask = mask & (columns > own - window_tokens)
            self._masks[key] = mask
        return self._masks[key]


def _int32(values: Sequence[int]) -> mx.array:
    return mx.array(list(values), dtype=mx.int32)
