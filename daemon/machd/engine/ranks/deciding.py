"""Deciders of ranks: rank 0 decides as it does alone and tells, and the others do what they are told."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import mlx.core as mx
import msgspec

from machd.engine.protocol.step import RowFault, SampledToken
from machd.engine.ranks.rank_group import RankGroup
from machd.engine.step.decode_pass import DecodePass
from machd.engine.step.ports import Decider
from machd.engine.step.row import Decoded, SettledRow
from machd.engine.step.verification import Span
from machd.errors import EngineFaultError

T = TypeVar("T")

_CHECKED_STEPS = 16
"""Steps that only decode of which ranks check one's memory: they have to wait for one another to do so."""

_encode = msgspec.msgpack.encode
_SLOTS = msgspec.msgpack.Decoder(list[int])
_SPANS = msgspec.msgpack.Decoder(list[tuple[int, ...]])
_SETTLED: msgspec.msgpack.Decoder[list[SettledRow] | None] = msgspec.msgpack.Decoder(
    list[SettledRow] | None
)


class _RankDecider(Decider):
    def __init__(self, group: RankGroup) -> None:
        self._group = group
        self._steps = 0

    def agree_on_memory(
        self, measure: Callable[[], tuple[int, int]], *, only_decodes: bool
    ) -> tuple[int, int] | None:
        """Return the need, and what is left for it, of the rank that has least to spare."""
        self._steps += 1
        if only_decodes and self._steps % _CHECKED_STEPS:
            return None  # for none of the ranks, or all of them would have to know
        ranks = self._group.gather(measure())
        needed_bytes, left_bytes = min(ranks, key=lambda rank: rank[1] - rank[0])
        return needed_bytes, left_bytes


class Leading(_RankDecider):
    """The decider of rank 0."""

    def agree_on_joining(self, slot_indices: Sequence[int]) -> Sequence[int]:
        """Tell which rows can begin to decode."""
        self._group.tell(_encode(slot_indices))
        return slot_indices

    def agree_on_spans(self, choose: Callable[[], list[Span]], rows: int) -> list[Span]:
        """Choose, and tell the tokens ahead."""
        spans = super().agree_on_spans(choose, rows)
        self._group.tell(_encode([span.ahead_ids for span in spans]))
        return spans

    def agree_on_result(
        self, current: DecodePass, settle: Callable[[DecodePass], Decoded | None]
    ) -> Decoded | None:
        """Settle, and tell what rows keep."""
        decoded = super().agree_on_result(current, settle)
        if decoded is None:
            mx.eval(
                current.logits
            )  # the others compute this pass, too, before they hear of another
        self._group.tell(_encode(None if decoded is None else decoded.settled))
        return decoded


class Following(_RankDecider):
    """The decider of any other rank."""

    def agree_on_joining(self, slot_indices: Sequence[int]) -> Sequence[int]:
        """Return the rows that could begin on rank 0."""
        del slot_indices
        return self._told(_SLOTS)

    def agree_on_spans(self, choose: Callable[[], list[Span]], rows: int) -> list[Span]:
        """Return spans with the tokens that rank 0 put ahead; nothing is sampled here.

        Raises:
            EngineFaultError: Rank 0 has other rows.
        """
        del choose
        told = self._told(_SPANS)
        _check_rows(len(told) or rows, rows)
        return [Span(ahead_ids, ()) for ahead_ids in told]

    def agree_on_result(
        self, current: DecodePass, settle: Callable[[DecodePass], Decoded | None]
    ) -> Decoded | None:
        """Compute the pass, and return what rank 0 keeps: each row's last token, or a fault.

        Raises:
            EngineFaultError: Rank 0 has other rows.
        """
        del settle
        mx.eval(current.logits)
        if (settled := self._told(_SETTLED)) is None:
            return None
        _check_rows(len(settled), len(current.rows))
        decoded = Decoded(span_tokens=current.longest, settled=settled)
        for row, one in zip(current.rows, settled, strict=True):
            if one.has_failed or one.last_token_id is None:
                fault = EngineFaultError("the row failed on rank 0")
                decoded.faults.append(RowFault(row.slot_index, fault))
            else:
                decoded.tokens.append(SampledToken(row.slot_index, one.last_token_id))
        return decoded

    def _told(self, decoder: msgspec.msgpack.Decoder[T]) -> T:
        return decoder.decode(self._group.tell(b""))


def decider_of(group: RankGroup) -> Decider:
    """Return this rank's decider."""
    return Leading(group) if group.leads else Following(group)


def _check_rows(told: int, there: int) -> None:
    if told != there:
        raise EngineFaultError(f"rank 0 decodes {told} rows and this rank {there}")
