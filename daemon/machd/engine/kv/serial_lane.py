"""The KV of a row that has a lane of its own, in the caches that the model itself makes."""

from __future__ import annotations

from collections.abc import Sequence

from machd.engine.backend.untyped import Cache
from machd.engine.kv.lane_kv import JoiningRow, LaneKv, PrefilledRow
from machd.engine.kv.rollback import CacheCheckpoint, supports_rollback
from machd.engine.kv.row_caches import innermost
from machd.engine.protocol.slab_size import COLUMN_STEP


class SerialLaneKv(LaneKv):
    """A lane of one row. It needs no wiping, as its caches give no column after the row's end."""

    def __init__(self) -> None:
        self.caches: list[Cache] = []
        self._can_roll_back = False
        self._room_tokens = 0
        self._checkpoint: CacheCheckpoint | None = None
        self._added = 0

    @property
    def takes_ragged_spans(self) -> bool:
        """Always true: one row has no padding."""
        return True

    @property
    def can_roll_back(self) -> bool:
        """True if every cache is of a class with a known rollback."""
        return self._can_roll_back

    @property
    def room_tokens(self) -> int:
        """Remaining positions of the row's reservation."""
        return self._room_tokens

    def join(self, row: PrefilledRow) -> None:
        """Take over the row's caches."""
        assert not self.caches, "there is one row"
        assert row.index == 0, "the row was computed alone"
        self.caches = list(row.caches)
        self._room_tokens = row.limit - row.length
        self._can_roll_back = all(supports_rollback(cache) for cache in innermost(self.caches))

    def select(self, order: Sequence[int]) -> None:
        """Keep the only row."""
        assert list(order) == [0], "there is one row"

    def clear(self) -> None:
        """Drop the row."""
        self.caches = []
        self._checkpoint = None

    def begin_pass(self, lengths: Sequence[int] | None = None) -> None:
        """Count the pass's tokens; the caches count their positions themselves."""
        added = 1 if lengths is None else lengths[0]
        self._added += added
        self._room_tokens -= added

    def checkpoint(self) -> None:
        """Remember the state of every cache."""
        self._checkpoint = CacheCheckpoint.of(innermost(self.caches))
        self._added = 0

    def roll_back(self, counts: Sequence[int]) -> bool:
        """Remove the row's last positions; not done where there is recurrent state."""
        checkpoint, self._checkpoint = self._checkpoint, None
        assert checkpoint is not None, "there is a checkpoint"
        is_done = checkpoint.roll_back(counts, [self._added])
        self._room_tokens += counts[0] if is_done else self._added
        return is_done

    def growth_bytes(self, joining: Sequence[JoiningRow], tokens: int, bytes_per_token: int) -> int:
        """Growth by 256 positions at a time; the row that joins brings its own caches."""
        return max(tokens, COLUMN_STEP) * bytes_per_token if self.caches or joining else 0
