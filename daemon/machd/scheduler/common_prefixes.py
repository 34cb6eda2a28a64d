"""Common prefixes of prompts: a leader for each new row, and a prefix that rows share.

A row that has not begun waits for its leader, the row that computes most of its prompt now. A sequence that gets
a slot of the batch lane may share a numbered prefix with other rows. The first of these rows to join the
lane brings its keys and values, so no block has to be in memory for it. Two prompts are compared once, for the leader and for sharing.
"""

from __future__ import annotations

from dataclasses import dataclass

from machd.engine.protocol.step import Lane, SharedPrefix
from machd.scheduler.block_tree import Block, common_tokens
from machd.scheduler.prefix_limits import PrefixConfig
from machd.scheduler.seen_prefixes import SeenText
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
        pinned: The block that it pins: the later of the end of its reused prefix and the tip.
        found_tokens: Length of the prefix to reuse.
        kept_tokens: Length of the longest prefix that any of its lookups found kept.
        seen: Its text in the memory of computed prefixes.
        leader: The row that it waits for, if any.
        leader_tokens: Tokens that the leader has to compute first.
        is_compared: It was compared with all rows: none computes more of its prompt than it has.
        is_loading: More of its blocks have still to be requested from disk.
        branch_point: End of its prefix in the tree, if a snapshot is wanted there; else 0.
    """

    __slots__ = (
        "beginning",
        "branch_point",
        "found_tokens",
        "is_compared",
        "is_loading",
        "is_open",
        "kept_tokens",
        "known",
        "leader",
        "leader_tokens",
        "pinned",
        "root",
        "seen",
        "sequence",
        "tip",
    )

    def __init__(self, sequence: Sequence, root: Block, block_tokens: int) -> None:
        self.sequence = sequence
        self.beginning = () if sequence.asks_prompt_logprobs else sequence.prefill_token_ids[:-1]
        self.root = self.known = self.tip = self.pinned = root
        self.found_tokens = self.kept_tokens = 0
        self.seen = SeenText(sequence, block_tokens)
        self.is_open = self.is_compared = self.is_loading = False
        self.leader: PrefixRow | None = None
        self.leader_tokens = 0
        self.branch_point = 0


@dataclass(frozen=True, slots=True)
class Sharing:
    """A prefix that a sequence could share.

    Attributes:
        prefix: Beginning of its prompt.
        peer: A running sequence whose own prompt is not computed yet, and which would share it too.
    """

    prefix: SharedPrefix
    peer: Sequence | None = None


class CommonPrefixes:
    """Choice of a leader for each row that has not begun, and of a prefix to share for each new one."""

    def __init__(self, rows: dict[int, PrefixRow], shape: PrefixConfig) -> None:
        """Choose among running ``rows``, by slot, in the order in which they got their slots."""
        self._rows = rows
        self._block_tokens = shape.block_tokens
        self._min_gain_tokens = shape.min_gain_tokens
        self._min_shared_tokens = shape.min_shared_tokens
        self._is_stateful = shape.costs.is_stateful
        self._next_number = 1
        # Prefixes of running sequences, and of the one that asked for a slot last.
        self._compared: dict[Sequence, dict[Sequence, int]] = {}

    def leave(self, row: PrefixRow) -> list[PrefixRow]:
        """Remove a row that has left; return the rows that waited for it."""
        self._compared.pop(row.sequence, None)
        for known in self._compared.values():
            known.pop(row.sequence, None)
        return [other for other in self._rows.values() if other.leader is row]

    def sharing(self, sequence: Sequence) -> Sharing | None:
        """Find the prefix to share for a sequence that has no slot yet; None if it has none to share.

        A prefix that rows share already comes first. A decoding row keeps its own columns, but its common prefix
        with this prompt is likely to come again. A new prefix has whole blocks, so that a few equal tokens behind the
        common part do not make it too long for later prompts.
        """
        if not sequence.has_completion:
            return None
        for former in [one for one in self._compared if not one.is_running and one is not sequence]:
            del self._compared[former]
        namespace = sequence.request.cache_namespace
        others = (row.sequence for _, row in sorted(self._rows.items()))
        common = {
            other: self._sharable_tokens(sequence, other)
            for other in others
            if other.lane is Lane.BATCH and other.request.cache_namespace == namespace
        }
        shared = {one.shared for one, tokens in common.items() if _shares_at_most(one, tokens)}
        if known := max(
            filter(None, shared), key=lambda one: (one.tokens, -one.number), default=None
        ):
            return Sharing(known)
        peer = max(
            (one for one in common if one.shared is None), key=common.__getitem__, default=None
        )
        tokens = 0 if peer is None else common[peer] // self._block_tokens * self._block_tokens
        if peer is None or tokens < self._min_shared_tokens:
            return None
        prefix = SharedPrefix(self._next_number, tokens)
        self._next_number += 1
        return Sharing(prefix, None if peer.is_prefilled else peer)

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
            common = self._common_tokens(row.sequence, other.sequence)
            common = min(common, len(row.beginning), len(other.beginning))
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

        Each ends a chunk and makes a snapshot of all state.
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

    def _sharable_tokens(self, sequence: Sequence, other: Sequence) -> int:
        """Return the tokens that two prompts have in common, last ones left out: rows decode from these on."""
        if not other.has_completion:
            return 0
        common = self._common_tokens(sequence, other)
        return min(common, sequence.prompt_tokens - 1, other.prompt_tokens - 1)

    def _common_tokens(self, sequence: Sequence, other: Sequence) -> int:
        """Return the common prefix of what two rows compute before they decode, compared once."""
        known = self._compared.setdefault(sequence, {})
        if other not in known:
            known[other] = self._compare(sequence, other, known)
        return known[other]

    def _compare(self, sequence: Sequence, other: Sequence, known: dict[Sequence, int]) -> int:
        """Compare two texts, skipping what follows from comparisons with a third one."""
        common = 0
        if known:
            nearest = max(known, key=known.__getitem__)
            its = self._compared.get(other, {}).get(
                nearest, self._compared.get(nearest, {}).get(other)
            )
            if its is not None and its != known[nearest]:
                return min(its, known[nearest])
            common = known[nearest] if its is not None else 0
        return common_tokens(other.prefill_token_ids, sequence.prefill_token_ids, known=common)

    def _is_leading(self, row: PrefixRow) -> bool:
        """Return True if a row is in prefill and its blocks have been stored so far."""
        if row.sequence.is_prefilled or not row.tip.is_usable:
            return False
        boundary = (row.tip.stop // self._block_tokens + 1) * self._block_tokens
        return row.sequence.prefilled_tokens < boundary


def _shares_at_most(sequence: Sequence, tokens: int) -> bool:
    return sequence.shared is not None and sequence.shared.tokens <= tokens
