"""Decoding of a lane's rows, one step at a time: read :meth:`Decoder.decode` first.

Every row has a span in a step: its last token, whose keys and values are not computed yet, and tokens
ahead of it. Tokens ahead are forced (dictated by the row's grammar) or drafts (proposed). All spans go
through one forward pass, every position is sampled as if it were decoded alone, and the caches are rolled
back to the last token that was right. A row without tokens ahead has a span of one.

The forward pass is dispatched before it is sampled, so that grammar masks are filled while the device
computes. :mod:`machd.engine.step.look_ahead` overlaps whole steps as well.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import mlx.core as mx

from machd.engine.kv.lane_kv import CachedRow, LaneKv, PrefilledRow
from machd.engine.kv.row_positions import JoiningRow
from machd.engine.protocol.step import (
    DecodeRow,
    DraftFault,
    DraftOutcome,
    RowFault,
    SettledRow,
    SpanCost,
)
from machd.engine.step.decode_pass import Chunk, DecodePass, Passes
from machd.engine.step.decoder_row import Decoded, DecoderRow
from machd.engine.step.ports import Masks
from machd.engine.step.sampling import Sampler, Selection
from machd.engine.step.tokens_ahead import MAX_FORCED_TOKENS, Offer, worthwhile_tokens
from machd.engine.step.verification import Span, Verdict, span_of, verify


@dataclass(slots=True)
class Sampled:
    """A pass whose positions have been sampled, lazily.

    Attributes:
        parts: Rows with the selection that covers their spans; one part, unless a sampler failed.
        failed: Rows whose sampler raised, with the cause.
    """

    current: DecodePass
    parts: list[tuple[list[DecoderRow], Selection]]
    failed: list[tuple[DecoderRow, BaseException]]

    @property
    def rows(self) -> list[DecoderRow]:
        """Rows that got a token."""
        return [row for rows, _ in self.parts for row in rows]


class Decoder:
    """The rows of one lane. Lives on the engine thread."""

    def __init__(
        self,
        passes: Passes,
        kv: LaneKv,
        vocabulary_tokens: int,
        masks: Masks | None = None,
    ) -> None:
        """Begin without rows.

        Args:
            passes: Forward passes over the lane's rows.
            kv: Keys, values and states of the rows.
            vocabulary_tokens: Width of the logits.
            masks: Fills the masks of rows with a grammar; None where there are none.
        """
        self._passes = passes
        self._kv = kv
        self._vocabulary_tokens = vocabulary_tokens
        self._masks = masks
        self._rows: list[DecoderRow] = []
        self._sampler: Sampler | None = None
        self._sampler_rows: list[DecoderRow] = []

    @property
    def slot_indices(self) -> frozenset[int]:
        """Slots of the rows that the next step computes."""
        return frozenset(row.slot_index for row in self._rows)

    @property
    def row_states(self) -> list[tuple[int, int, int]]:
        """Slot, length and last token of each row."""
        return [(row.slot_index, row.length, row.last_token_id) for row in self._rows]

    @property
    def kv_bytes(self) -> int:
        """Bytes that the rows' caches hold, those of draft models included."""
        drafting = sum(row.proposals.kv_bytes for row in self._rows if row.proposals is not None)
        return self._kv.nbytes + drafting

    def growth_bytes(
        self, joining: Sequence[JoiningRow], draft_tokens: int, bytes_per_token: int
    ) -> int:
        """Upper bound of the bytes that the next pass allocates; see :meth:`LaneKv.growth_bytes`.

        Forced tokens of joining rows are not counted: they are few beside the columns that a slab grows by.
        """
        is_constrained = any(row.sampling.matcher is not None for row in self._rows)
        ahead_tokens = max(draft_tokens, MAX_FORCED_TOKENS if is_constrained else 0)
        return self._kv.growth_bytes(joining, 1 + ahead_tokens, bytes_per_token)

    def cached_row(self, slot_index: int) -> CachedRow | None:
        """Locate a slot's row; None if it has left."""
        for index, row in enumerate(self._rows):
            if row.slot_index == slot_index:
                return self._kv.locate(index, row.length)
        return None

    def join(self, row: DecoderRow, prefilled: PrefilledRow) -> None:
        """Add a row whose prompt is computed but for its last token."""
        self._kv.join(prefilled)
        row.last_token_id, row.length = prefilled.last_token_id, prefilled.length
        self._rows.append(row)

    def leave(self, slot_indices: Collection[int]) -> None:
        """Remove rows."""
        self._remove([row for row in self._rows if row.slot_index in slot_indices])

    def close(self) -> None:
        """Give back what proposers hold for the rows."""
        for row in self._rows:
            if row.proposals is not None:
                row.proposals.close()

    def decode(
        self, plan_rows: Mapping[int, DecodeRow], cost: SpanCost, beside: Sequence[Chunk] = ()
    ) -> Decoded:
        """Decode all rows of the lane, at least one: each gets its accepted tokens ahead and one token more.

        Args:
            plan_rows: The plan's rows by slot; a row that joined in this step may be missing, and decodes too.
            cost: Cost of tokens ahead.
            beside: Chunks of prompts to compute in the same pass, which has no tokens ahead then.

        Returns:
            Tokens or a fault for each row; with look-ahead, neither for a row that has just joined.
        """
        spans = self._choose_ahead(plan_rows, cost) if not beside else []
        return self._settle(self._sample(self._dispatch(spans, beside)))

    # Choosing tokens ahead

    def _choose_ahead(self, plan_rows: Mapping[int, DecodeRow], cost: SpanCost) -> list[Span]:
        """Choose each row's span; empty if no tokens ahead are worth a longer pass."""
        rows = [
            (row, plan_rows.get(row.slot_index, DecodeRow(row.slot_index))) for row in self._rows
        ]
        # Where kv/ cannot keep padding out, the probe batched_drafts has to have passed: a plan that allows
        # drafts says so, and then padding with forced tokens is safe as well.
        may_pad = self._kv.takes_ragged_spans or any(one.max_draft_tokens for _, one in rows)
        if not (self._kv.can_roll_back and may_pad):
            return []
        room_tokens = self._room_tokens
        proposed = [self._propose(row, one, cost, room_tokens) for row, one in rows]
        if not any(proposed) and not any(row.forced_tokens for row, _ in rows):
            return []
        spans = [
            self._span_of(row, token_ids, room_tokens)
            for (row, _), token_ids in zip(rows, proposed, strict=True)
        ]
        offers = [
            Offer(span.forced_tokens, span.draft_tokens, one.acceptance)
            for span, (_, one) in zip(spans, rows, strict=True)
        ]
        ahead_tokens = worthwhile_tokens(offers, cost)
        return [span.first(ahead_tokens) for span in spans] if ahead_tokens else []

    def _propose(
        self, row: DecoderRow, plan_row: DecodeRow, cost: SpanCost, room_tokens: int
    ) -> tuple[int, ...]:
        """Ask the row's proposer for draft tokens, as many as could be of use."""
        if row.proposals is None or not row.proposals.is_open:
            return ()
        # After its accepted drafts a row gets one token more.
        limit = min(plan_row.max_draft_tokens, room_tokens, row.tokens_left - 1)
        if limit > 0 and not row.proposals.is_lookup:
            # A draft model is paid by the token: ask for no more than a lone row would use.
            limit = worthwhile_tokens([Offer(0, limit, plan_row.acceptance)], cost)
        return row.proposals.propose(limit)

    def _span_of(self, row: DecoderRow, proposed: Sequence[int], room_tokens: int) -> Span:
        limit = min(max(len(proposed), MAX_FORCED_TOKENS), room_tokens, row.tokens_left - 1)
        try:
            return span_of(row.sampling, proposed, limit)
        except BaseException as cause:  # noqa: BLE001 - a panic of the grammar on a drafted path
            if row.proposals is not None:
                row.proposals.fail(cause)
            return span_of(row.sampling, (), 0)

    @property
    def _room_tokens(self) -> int:
        """Most tokens ahead with which every row, padded, stays within what is reserved for the lane."""
        return max(0, self._kv.room_tokens - 1)

    # Forward and sampling

    def _dispatch(self, spans: Sequence[Span] = (), beside: Sequence[Chunk] = ()) -> DecodePass:
        last_ids = mx.array([row.last_token_id for row in self._rows], dtype=mx.int32)
        return self._passes.dispatch(self._rows, last_ids, spans, beside)

    def _sample(self, current: DecodePass) -> Sampled:
        """Sample every position in one call.

        If that raises with tokens ahead, rows with both a grammar and a proposer have no more drafts, and the
        pass is repeated without tokens ahead. In a plain pass each row is then sampled alone.
        """
        if current.longest == 1:
            sampled = self._sample_plain(current)
        else:
            samplings = [one for span in current.spans for one in span.samplings]
            try:
                sampler = Sampler(samplings, self._vocabulary_tokens, self._masks)
                sampled = Sampled(current, [(current.rows, sampler.sample(current.logits))], [])
            except BaseException as cause:  # noqa: BLE001 - if it comes again, _sample_plain finds the row
                for row in current.rows:  # a grammar may fail on a drafted path alone
                    if row.sampling.matcher is not None and row.proposals is not None:
                        row.proposals.fail(cause)
                return self._sample(self._recompute(current))
        mx.async_eval([array for _, selection in sampled.parts for array in selection.arrays])
        return sampled

    def _sample_plain(self, current: DecodePass) -> Sampled:
        rows = current.rows
        try:
            if self._sampler is None or self._sampler_rows != rows:
                samplings = [row.sampling for row in rows]
                self._sampler = Sampler(samplings, self._vocabulary_tokens, self._masks)
                self._sampler_rows = rows
            return Sampled(current, [(rows, self._sampler.sample(current.logits))], [])
        except BaseException:  # noqa: BLE001 - comes again below, from its own row
            self._sampler = None
        sampled = Sampled(current, [], [])
        for place, row in enumerate(rows):
            try:
                sampler = Sampler([row.sampling], self._vocabulary_tokens, self._masks)
                selection = sampler.sample(current.logits[place : place + 1])
            except BaseException as cause:  # noqa: BLE001 - a row's fault, a panic in llguidance included
                sampled.failed.append((row, cause))
            else:
                sampled.parts.append(([row], selection))
        return sampled

    def _recompute(self, current: DecodePass) -> DecodePass:
        """Undo a pass with tokens ahead and dispatch it again without them, on finite caches.

        A NaN in a drafted position leaks into the positions before it through masked attention, because
        0 x NaN is NaN. A row that has it without drafts, too, is at fault itself.
        """
        is_rolled_back = self._kv.roll_back([span.length for span in current.spans])
        assert is_rolled_back, "a whole pass can be rolled back"
        for place, (row, span) in enumerate(zip(current.rows, current.spans, strict=True)):
            row.length -= span.length
            self._kv.wipe(place, row.length)
        pairs = zip(current.rows, current.spans, strict=True)
        rejected = [one for row, span in pairs for one in _outcome(row, span, 0)]
        return replace(self._dispatch(), outcomes=tuple(rejected))

    # Settling rows

    def _settle(self, sampled: Sampled) -> Decoded:
        """Read the sampled tokens, roll rejected tokens ahead back, and move every row on."""
        verdicts = _verdicts(sampled)
        if sampled.current.longest > 1 and any(one.tokens[-1] is None for one in verdicts.values()):
            sampled = self._sample(self._recompute(sampled.current))
            verdicts = _verdicts(sampled)
        current = sampled.current
        decoded = Decoded(drafts=list(current.outcomes), span_tokens=current.longest)
        if current.longest > 1:
            for row, span in zip(current.rows, current.spans, strict=True):
                decoded.drafts += _outcome(row, span, verdicts[row].accepted_tokens)
        causes = dict(sampled.failed)
        for row, verdict in verdicts.items():
            if (cause := self._move_on(row, verdict)) is not None:
                causes[row] = cause
            else:
                decoded.tokens += [token for token in verdict.tokens if token is not None]
        decoded.faults = [RowFault(row.slot_index, cause) for row, cause in causes.items()]
        self._keep(
            current, [_settled(verdicts.get(row), has_failed=row in causes) for row in current.rows]
        )
        decoded.draft_faults = self._take_draft_faults()
        return decoded

    def _take_draft_faults(self) -> list[DraftFault]:
        """Return the faults of proposers; a row that leaves with a fault of its own reports that alone."""
        proposing = [(row, row.proposals) for row in self._rows if row.proposals is not None]
        faults = [(row, proposals.take_fault()) for row, proposals in proposing]
        return [DraftFault(row.slot_index, fault) for row, fault in faults if fault is not None]

    def _move_on(self, row: DecoderRow, verdict: Verdict) -> BaseException | None:
        """Let a row continue after its accepted tokens; returns its fault, if any."""
        last = verdict.tokens[-1]
        if last is None:
            return FloatingPointError("the row's logits are not numbers")
        row.sampling.take(verdict.sampling)
        if row.proposals is not None:
            row.proposals.extend([token.token_id for token in verdict.tokens if token is not None])
        matcher = row.sampling.matcher
        if matcher is None:
            return None
        try:
            if not matcher.take_forced(1):  # a forced token is the one that was sampled
                matcher.accept(last.token_id)
        except BaseException as cause:  # noqa: BLE001 - a row's fault, a panic in llguidance included
            return cause
        if matcher.is_done:
            row.sampling.matcher = None
            self._sampler = None  # it was made with the matcher
        return None

    def _keep(self, current: DecodePass, settled: Sequence[SettledRow]) -> None:
        """Keep of a pass what its rows keep: roll the rest back, and remove the rows that failed."""
        if current.longest > 1:
            self._roll_back(current, [one.kept_tokens for one in settled])
        for row, one in zip(current.rows, settled, strict=True):
            if one.last_token_id is None:
                continue
            row.last_token_id = one.last_token_id
            if not one.is_finite:
                # Zero times NaN is NaN: masked columns leak into later tokens' attention. Only after a padded
                # pass, before which look-ahead removes no row.
                self._kv.wipe(self._rows.index(row), row.length)
        pairs = zip(current.rows, settled, strict=True)
        self._remove([row for row, one in pairs if one.has_failed])

    def _roll_back(self, current: DecodePass, kept: Sequence[int]) -> None:
        """Remove rejected tokens ahead from the caches."""
        rejected = [span.length - count for span, count in zip(current.spans, kept, strict=True)]
        for row, count in zip(current.rows, rejected, strict=True):
            row.length -= count
        if not self._kv.roll_back(rejected):
            # Recurrent state is only known as it was before the pass.
            self._passes.compute_again(current, kept)

    def _remove(self, rows: Collection[DecoderRow]) -> None:
        """Remove rows; the last rows move into the gaps, all others keep their places."""
        before = self._rows
        if not any(row in rows for row in before):
            return
        for row in rows:
            row.is_gone = True
            if row.proposals is not None:
                row.proposals.close()
        order = _compact([row.is_gone for row in before])
        self._rows = [before[place] for place in order]
        if not order:
            self._kv.clear()
            return
        self._kv.keep(order)


def _verdicts(sampled: Sampled) -> dict[DecoderRow, Verdict]:
    """Wait for the sampled tokens and compare them with the tokens ahead."""
    spans = dict(zip(sampled.current.rows, sampled.current.spans, strict=True))
    verdicts: dict[DecoderRow, Verdict] = {}
    for rows, selection in sampled.parts:
        places = [(row, one) for row in rows for one in spans[row].samplings]
        slot_indices = [row.slot_index for row, _ in places]
        chosen = selection.read(slot_indices, [one.params for _, one in places])
        begin = 0
        for row in rows:
            span = spans[row]
            verdicts[row] = verify(span, chosen[begin : begin + span.length])
            begin += span.length
    return verdicts


def _settled(verdict: Verdict | None, *, has_failed: bool) -> SettledRow:
    """Return what a row keeps of a pass; None for a row that was not sampled."""
    if verdict is None:
        return SettledRow(kept_tokens=1, last_token_id=None, is_finite=True, has_failed=True)
    last = verdict.tokens[-1]
    last_token_id = None if last is None else last.token_id
    return SettledRow(1 + verdict.accepted_tokens, last_token_id, verdict.is_finite, has_failed)


def _outcome(row: DecoderRow, span: Span, accepted_tokens: int) -> list[DraftOutcome]:
    """Report a span's drafts; empty for a span that had none."""
    accepted = max(0, accepted_tokens - span.forced_tokens)
    return [DraftOutcome(row.slot_index, span.draft_tokens, accepted)] if span.draft_tokens else []


def _compact(leaves: Sequence[bool]) -> list[int]:
    """Return the old place of each row that stays, such that as few as possible move.

    >>> _compact([False, True, True, False])
    [0, 3]
    """
    stays = [place for place, is_leaving in enumerate(leaves) if not is_leaving]
    fillers = iter(reversed(stays))
    return [next(fillers) if leaves[place] else place for place in range(len(stays))]
