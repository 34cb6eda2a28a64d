"""Leaders: rows whose prompt other rows wait for, because they compute the same prefix now."""

from __future__ import annotations

from machd.scheduler.block_tree import Block, common_tokens
from machd.scheduler.sequence import Sequence

_MAX_BRANCH_POINTS = 2
"""Most branch points at which a row leaves snapshots for rows that wait for it."""


class PrefixRow:
    """A running sequence and its place in the tree.

    Attributes:
        beginning: Reusable tokens of what it computes before it decodes: all but the last, and none where log-probabilities
            of the prompt are requested, which need every token computed.
        known: Last block known to be part of its text, from which lookups go on.
        tip: Last block of its text that is in memory with the whole path to it.
        pinned: The block that it pins: the end of its reused prefix until the tip is as far, then the
            tip.
        found_tokens: Length of the prefix to reuse.
        leader: The row that it waits for, if any.
        leader_tokens: Tokens that the leader has to compute first.
        is_compared: No row computes more of its prompt than it has.
        is_loading: More of its blocks have still to be requested from disk.
        branch_point: End of its prefix in the tree, if a snapshot is wanted there; else 0.
        common_tokens: Common prefix with each row that it was compared with.
        nearest: The row of those with the longest common prefix.
    """

    __slots__ = (
        "beginning",
        "branch_point",
        "common_tokens",
        "found_tokens",
        "is_compared",
        "is_loading",
        "is_open",
        "known",
        "leader",
        "leader_tokens",
        "nearest",
        "pinned",
        "root",
        "sequence",
        "tip",
    )

    def __init__(self, sequence: Sequence, root: Block) -> None:
        self.sequence = sequence
        self.beginning = () if sequence.asks_prompt_logprobs else sequence.prefill_token_ids[:-1]
        self.root = self.known = self.tip = self.pinned = root
        self.common_tokens: dict[PrefixRow, int] = {}
        self.nearest: PrefixRow | None = None
        self.found_tokens = 0
        self.is_open = self.is_compared = self.is_loading = False
        self.leader: PrefixRow | None = None
        self.leader_tokens = 0
        self.branch_point = 0


class Leaders:
    """Choice of a leader for each row that has not begun."""

    def __init__(
        self,
        rows: dict[int, PrefixRow],
        *,
        block_tokens: int,
        min_gain_tokens: int,
        is_stateful: bool,
    ) -> None:
        """Choose among ``rows``, by slot, for a gain of at least ``min_gain_tokens``."""
        self._rows = rows
        self._block_tokens = block_tokens
        self._min_gain_tokens = min_gain_tokens
        self._is_stateful = is_stateful

    def leave(self, row: PrefixRow) -> list[PrefixRow]:
        """Forget a row that has left; returns those that waited for it."""
        for other in self._rows.values():
            other.common_tokens.pop(row, None)
            if other.nearest is row:
                known = other.common_tokens
                other.nearest = max(known, key=known.__getitem__, default=None)
        return [other for other in self._rows.values() if other.leader is row]

    def leader_of(self, row: PrefixRow, found_tokens: int) -> tuple[PrefixRow | None, int]:
        """Return the row that computes most of this prompt now, and the common tokens; None if none."""
        best, best_tokens = None, found_tokens + self._min_gain_tokens - 1
        for other in self._rows.values():
            if other is row:
                break  # later rows may wait for this one
            if other.root is not row.root or not self._is_leading(other):
                continue
            if other.sequence.place > row.sequence.place:
                continue  # its prefill comes later
            common = self._common_tokens(row, other)
            is_more = common > max(best_tokens, self._kept_tokens(other))
            if is_more and self._leaves_state_at(common, other, besides=row):
                best, best_tokens = other, common
        return best, best_tokens if best is not None else 0

    def goes_on_waiting(self, row: PrefixRow) -> bool:
        """Return True if a row's leader still computes what the row waits for."""
        leader = row.leader
        if leader is None or not row.pinned.is_usable or not self._is_leading(leader):
            return False
        if leader.sequence.place > row.sequence.place:
            return False  # its prefill comes later by now
        if row.leader_tokens <= self._kept_tokens(leader):
            return False
        return self._leaves_state_at(row.leader_tokens, leader, besides=row)

    def _leaves_state_at(self, tokens: int, leader: PrefixRow, *, besides: PrefixRow) -> bool:
        """Return True if a leader makes a snapshot at ``tokens`` for one more row."""
        if not self._is_stateful:
            return True
        branch_points = self.awaited_branch_points(leader, besides=besides)
        return (
            tokens in branch_points
            or len(branch_points) < _MAX_BRANCH_POINTS
            or tokens > min(branch_points)
        )

    def awaited_branch_points(
        self, leader: PrefixRow, besides: PrefixRow | None = None
    ) -> list[int]:
        """Branch points of a row and the rows that wait for it; with state only the furthest ones.

        Each ends a chunk and copies all state.
        """
        waiting = {
            row.leader_tokens
            for row in self._rows.values()
            if row.leader is leader and row is not besides
        }
        return sorted(waiting)[-_MAX_BRANCH_POINTS:] if self._is_stateful else sorted(waiting)

    def _kept_tokens(self, row: PrefixRow) -> int:
        """Tokens of a row for which others need not wait any more.

        A snapshot is only taken at the row's position; blocks without state are stored any time later.
        """
        return row.sequence.prefilled_tokens if self._is_stateful else row.tip.stop

    def _common_tokens(self, row: PrefixRow, other: PrefixRow) -> int:
        """Return the common prefix of two prompts, compared once."""
        common = row.common_tokens.get(other)
        if common is None:
            common = row.common_tokens[other] = self._compare(row, other)
            if row.nearest is None or common > row.common_tokens[row.nearest]:
                row.nearest = other
        return common

    def _compare(self, row: PrefixRow, other: PrefixRow) -> int:
        """Compare two prompts, skipping what follows from comparisons with a third one."""
        known, nearest = 0, row.nearest
        if nearest is not None:
            known = row.common_tokens[nearest]
            its = other.common_tokens.get(nearest, nearest.common_tokens.get(other))
            if its is not None and its != known:
                return min(its, known)
            known = known if its is not None else 0
        return common_tokens(other.beginning, row.beginning, known=known)

    def _is_leading(self, row: PrefixRow) -> bool:
        """Return True if a row is in prefill and its blocks have been stored so far."""
        if row.sequence.is_prefilled or not row.tip.is_usable:
            return False
        boundary = (row.tip.stop // self._block_tokens + 1) * self._block_tokens
        return row.sequence.prefilled_tokens < boundary
