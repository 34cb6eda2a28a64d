"""Choice of each row's span for the next pass of a lane: tokens ahead are proposed or forced, and weighed.

A pass over more tokens of each row takes longer and may yield more tokens. The plan says how much longer
(:class:`~machd.engine.protocol.step.SpanCost`), which is weighed against the tokens expected, without a clock:
one plan gives one choice, wherever it is run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from machd.engine.kv.lane_kv import LaneKv
from machd.engine.protocol.step import DecodeRow, SpanCost
from machd.engine.step.row import DecoderRow
from machd.engine.step.verification import Span, span_of

MAX_FORCED_TOKENS = 16
"""Forced tokens in one pass: a longer run is spread over several."""

_MAX_STRETCH = 2.0
"""Longest a pass that other rows wait for may last, in passes over one token."""


@dataclass(frozen=True, slots=True)
class Offer:
    """The tokens ahead that one row could take.

    Attributes:
        forced_tokens: Dictated by the row's grammar; always accepted.
        draft_tokens: Proposed after them.
        acceptance: Probability that a draft token is right if those before it are.
    """

    forced_tokens: int
    draft_tokens: int
    acceptance: float

    def expected_tokens(self, ahead_tokens: int) -> float:
        """Tokens expected to be accepted of the first ``ahead_tokens``."""
        forced = min(self.forced_tokens, ahead_tokens)
        drafts = min(self.draft_tokens, ahead_tokens - forced)
        return forced + sum(self.acceptance**place for place in range(1, drafts + 1))


def choose_spans(
    rows: Sequence[DecoderRow], kv: LaneKv, plan_rows: Mapping[int, DecodeRow], cost: SpanCost
) -> list[Span]:
    """Choose each row's span; empty if no tokens ahead are worth a longer pass."""
    planned = [(row, _plan_row(row, plan_rows)) for row in rows]
    # Where kv/ cannot keep padding out, the model must have passed the measurement batched_drafts (capabilities/):
    # only then does a plan allow drafts, and padding with forced tokens is safe as well.
    may_pad = kv.takes_ragged_spans or any(one.max_draft_tokens for _, one in planned)
    if not (kv.can_roll_back and may_pad):
        return []
    # With so many tokens ahead every row, padded, stays within what is reserved for the lane.
    room_tokens = max(0, kv.room_tokens - 1)
    proposed = [_propose(row, one, cost, room_tokens) for row, one in planned]
    if not any(proposed) and not any(row.forced_tokens for row in rows):
        return []
    spans = [
        _span_of(row, token_ids, room_tokens) for row, token_ids in zip(rows, proposed, strict=True)
    ]
    offers = [
        Offer(span.forced_tokens, span.draft_tokens, one.acceptance)
        for span, (_, one) in zip(spans, planned, strict=True)
    ]
    ahead_tokens = worthwhile_tokens(offers, cost)
    return [span.first(ahead_tokens) for span in spans] if ahead_tokens else []


def expects_tokens_ahead(
    rows: Sequence[DecoderRow], kv: LaneKv, plan_rows: Mapping[int, DecodeRow], cost: SpanCost
) -> bool:
    """True if tokens ahead of the sampled ones, not read yet, are likely to be worth a longer pass."""
    if not kv.can_roll_back:
        return False
    offers = []
    for row in rows:
        one = _plan_row(row, plan_rows)
        proposals, drafts = row.proposals, 0
        if one.max_draft_tokens:
            # A lookup that finds nothing after the read tokens seldom does after the next one.
            is_likely = proposals.propose(1) if proposals.is_lookup else proposals.is_active
            drafts = one.max_draft_tokens if is_likely else 0
        # The sampled token is the first of the forced ones.
        forced = row.forced_tokens - 1 if kv.takes_ragged_spans else 0
        offers.append(Offer(max(0, forced), drafts, one.acceptance))
    return worthwhile_tokens(offers, cost) > 0


def worthwhile_tokens(offers: Sequence[Offer], cost: SpanCost) -> int:
    """Choose how many tokens ahead make the most tokens a second; 0 where none gain enough.

    Rows are padded to the longest, so every row pays for each token ahead of one row. A gain that other
    rows wait for has to reach ``cost.least_batched_gain``. The pass may lose at most ``cost.max_lost_passes`` if
    every draft is wrong.
    """
    rows = len(offers)
    best, best_gain = 0, 1.0
    most = max((one.forced_tokens + one.draft_tokens for one in offers), default=0)
    for ahead in range(1, most + 1):
        length = 1.0 + cost.token_cost * ahead  # in passes over one token
        if rows > 1 and length > _MAX_STRETCH:
            break
        certain = sum(min(one.forced_tokens, ahead) for one in offers) / rows  # never lost
        if length - 1.0 - certain > cost.max_lost_passes:
            continue
        gain = (1.0 + sum(one.expected_tokens(ahead) for one in offers) / rows) / length
        least = cost.least_batched_gain if rows > 1 and length > 1.0 else 1.0
        if gain > max(best_gain, least):
            best, best_gain = ahead, gain
    return best


def _plan_row(row: DecoderRow, plan_rows: Mapping[int, DecodeRow]) -> DecodeRow:
    return plan_rows.get(row.slot_index, DecodeRow(row.slot_index))


def _propose(
    row: DecoderRow, plan_row: DecodeRow, cost: SpanCost, room_tokens: int
) -> tuple[int, ...]:
    """Ask the row's proposer for draft tokens, as many as could be of use."""
    if not row.proposals.is_active:
        return ()
    # After its accepted drafts a row gets one token more.
    limit = min(plan_row.max_draft_tokens, room_tokens, row.tokens_left - 1)
    if limit > 0 and not row.proposals.is_lookup:
        # A draft model is paid by the token: ask for no more than a lone row would use.
        limit = worthwhile_tokens([Offer(0, limit, plan_row.acceptance)], cost)
    return row.proposals.propose(limit)


def _span_of(row: DecoderRow, proposed: Sequence[int], room_tokens: int) -> Span:
    limit = min(max(len(proposed), MAX_FORCED_TOKENS), room_tokens, row.tokens_left - 1)
    try:
        return span_of(row.sampling, proposed, limit)
    except BaseException as cause:  # noqa: BLE001 - a panic of the grammar on a drafted path
        if row.proposals.is_active:
            row.proposals.fail(cause)
        return span_of(row.sampling, (), 0)
