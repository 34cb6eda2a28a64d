"""Decoding of a lane's rows, one step at a time: read :meth:`Decoder.decode` first.

Every row has a span in a step: its last token, whose keys and values are not computed yet, and tokens
ahead of it. Tokens ahead are forced (dictated by the row's grammar) or drafts (proposed). All spans go
through one forward pass, every position is sampled as if it were decoded alone, and the caches are rolled
back behind the first draft that differs. A row without tokens ahead has a span of one.

The forward pass is dispatched before it is sampled, so that grammar masks are filled while the device
computes. :mod:`machd.engine.step.look_ahead` overlaps whole steps as well.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import mlx.core as mx

from machd.engine.kv.lane_kv import CachedRow, LaneKv, PrefilledRow
from machd.engine.protocol.step import (
    DecodeRow,
    DraftFault,
    DraftOutcome,
    RowFault,
    SpanCost,
)
from machd.engine.step.decode_pass import Chunk, DecodePass, Passes
from machd.engine.step.decoder_row import Decoded, DecoderRow
from machd.engine.step.ports import Masks
from machd.engine.step.sampling import Sampler, Selection
from machd.engine.step.tokens_ahead import MAX_FORCED_TOKENS, Offer, worthwhile_tokens
from machd.engine.step.verification import Draft, Verdict, draft_of, verify


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
        caches: LaneKv,
        vocabulary_tokens: int,
        masks: Masks | None = None,
    ) -> None:
        """Begin without rows.

        Args:
            passes: Forward passes over the lane's rows.
            caches: Keys, values and states of the rows.
            vocabulary_tokens: Width of the logits.
            masks: Fills the masks of rows with a grammar; None where there are none.
        """
        self._passes = passes
        self._caches = caches
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
    def kv_bytes(self) -> int:
        """Bytes that the rows' caches hold, those of draft models included."""
        drafting = sum(row.proposals.kv_bytes for row in self._rows if row.proposals is not None)
        return self._caches.nbytes + drafting

    def growth_bytes(
        self, joining: Sequence[tuple[int, int]], draft_tokens: int, bytes_per_token: int
    ) -> int:
        """Upper bound of the bytes that the next pass allocates; see :class:`LaneKv`."""
        is_constrained = any(row.sampling.matcher is not None for row in self._rows)
        ahead_tokens = max(draft_tokens, MAX_FORCED_TOKENS if is_constrained else 0)
        return self._caches.growth_bytes(joining, 1 + ahead_tokens, bytes_per_token)

    def cached_row(self, slot_index: int) -> CachedRow | None:
        """Locate a slot's row; None if it has left."""
        for index, row in enumerate(self._rows):
            if row.slot_index == slot_index:
                return self._caches.locate(index, row.length)
        return None

    def join(self, row: DecoderRow, prefilled: PrefilledRow) -> None:
        """Add a row whose prompt is computed but for its last token."""
        self._caches.join(prefilled)
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
        self, asked: Mapping[int, DecodeRow], cost: SpanCost, beside: Chunk | None = None
    ) -> Decoded:
        """Compute the next tokens of every row: one each, and those ahead that are right.

        Args:
            asked: The plan's rows by slot; a row that joined in this step may be missing.
            cost: Cost of tokens ahead.
            beside: Prompt tokens to compute in the same pass, which has no tokens ahead then.

        Returns:
            Tokens or a fault for each row.
        """
        drafts = self._choose_ahead(asked, cost) if beside is None else []
        current = self._dispatch(drafts, beside)
        return self._settle(self._sample(current))

    # Choosing tokens ahead

    def _choose_ahead(self, asked: Mapping[int, DecodeRow], cost: SpanCost) -> list[Draft]:
        """Choose each row's tokens ahead; empty if none are worth a longer pass."""
        rows = [(row, asked.get(row.slot_index, DecodeRow(row.slot_index))) for row in self._rows]
        may_draft = any(one.max_draft_tokens for _, one in rows)
        can_roll_back = self._caches.can_roll_back
        if not (can_roll_back and (self._caches.takes_ragged_spans or may_draft)):
            return []
        room_tokens = self._room_tokens
        lookup = [self._propose(row, one, cost, room_tokens) for row, one in rows]
        if not any(lookup) and not any(row.forced_tokens for row, _ in rows):
            return []
        drafts = [
            self._draft_of(row, proposed, room_tokens)
            for (row, _), proposed in zip(rows, lookup, strict=True)
        ]
        offers = [
            Offer(draft.forced_tokens, len(draft.token_ids) - draft.forced_tokens, one.acceptance)
            for draft, (_, one) in zip(drafts, rows, strict=True)
        ]
        ahead_tokens = worthwhile_tokens(offers, cost)
        return [draft.first(ahead_tokens) for draft in drafts] if ahead_tokens else []

    def _propose(
        self, row: DecoderRow, asked: DecodeRow, cost: SpanCost, room_tokens: int
    ) -> tuple[int, ...]:
        """Ask the row's proposer for draft tokens, as many as could be of use."""
        if row.proposals is None or not row.proposals.is_open:
            return ()
        # Behind its drafts a row gets one token more.
        limit = min(asked.max_draft_tokens, room_tokens, row.tokens_left - 1)
        if limit > 0 and not row.proposals.is_lookup:
            limit = worthwhile_tokens([Offer(0, limit, asked.acceptance)], cost)
        return row.proposals.propose(limit)

    def _draft_of(self, row: DecoderRow, proposed: Sequence[int], room_tokens: int) -> Draft:
        limit = min(max(len(proposed), MAX_FORCED_TOKENS), room_tokens, row.tokens_left - 1)
        try:
            return draft_of(row.sampling, proposed, limit)
        except BaseException as cause:  # noqa: BLE001 - a panic of the grammar on a drafted path
            if row.proposals is not None:
                row.proposals.fail(cause)
            return draft_of(row.sampling, (), 0)

    @property
    def _room_tokens(self) -> int:
        """Tokens ahead for which padding needs no more columns than rows have reserved."""
        reserved = max(row.length + 1 + row.tokens_left for row in self._rows)
        return reserved - 1 - max(row.length for row in self._rows)

    # Forward and sampling

    def _dispatch(self, drafts: Sequence[Draft] = (), beside: Chunk | None = None) -> DecodePass:
        last_ids = mx.array([row.last_token_id for row in self._rows], dtype=mx.int32)
        return self._passes.dispatch(self._rows, last_ids, drafts, beside)

    def _sample(self, current: DecodePass) -> Sampled:
        """Sample every position in one call; if that fails, find the row at fault."""
        if not current.drafts:
            sampled = self._sample_plain(current)
        else:
            samplings = [one for draft in current.drafts for one in draft.samplings]
            try:
                sampler = Sampler(samplings, self._vocabulary_tokens, self._masks)
                sampled = Sampled(current, [(current.rows, sampler.sample(current.logits))], [])
            except BaseException as cause:  # noqa: BLE001 - comes again below, from its own row
                return self._sample(self._without_drafts(current, cause))
        mx.async_eval([array for _, selection in sampled.parts for array in selection.arrays])
        return sampled

    def _sample_plain(self, current: DecodePass) -> Sampled:
        rows = current.rows
        states = [row.sampling.state for row in rows]
        try:
            if self._sampler is None or self._sampler_rows != rows:
                samplings = [row.sampling for row in rows]
                self._sampler = Sampler(samplings, self._vocabulary_tokens, self._masks)
                self._sampler_rows = rows
            return Sampled(current, [(rows, self._sampler.sample(current.logits))], [])
        except BaseException:  # noqa: BLE001 - comes again below, from its own row
            self._sampler = None
            for row, state in zip(rows, states, strict=True):
                row.sampling.state = state
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

    def _without_drafts(self, current: DecodePass, cause: BaseException) -> DecodePass:
        """Reject every draft of a pass whose verification raised; grammar rows draft no more."""
        for row in current.rows:
            if row.sampling.matcher is not None and row.proposals is not None:
                row.proposals.fail(cause)
        self._roll_back(current, [0] * len(current.rows))
        firsts = [sum(current.lengths[:place]) for place in range(len(current.rows))]
        logits = current.logits[mx.array(firsts, dtype=mx.int32)]
        return replace(current, drafts=[], logits=logits, outcomes=_rejected(current))

    # Settling rows

    def _settle(self, sampled: Sampled) -> Decoded:
        """Read the sampled tokens, roll rejected drafts back, and move every row on."""
        current = sampled.current
        verdicts = _verdicts(sampled)
        if current.drafts:
            if not all(verdict.tokens[-1] for verdict in verdicts.values()):
                return self._settle(self._sample(self._recompute(current)))
            self._roll_back(current, [verdicts[row].accepted_tokens for row in current.rows])
        decoded = Decoded(drafts=list(current.outcomes), span_tokens=max(current.lengths))
        for row, draft in zip(current.rows, current.drafts, strict=False):
            decoded.drafts += _outcome(row, draft, verdicts[row].accepted_tokens)
        causes = dict(sampled.failed)
        for row, verdict in verdicts.items():
            if (cause := self._move_on(row, verdict)) is not None:
                causes[row] = cause
            elif not row.is_gone:
                decoded.tokens += [token for token in verdict.tokens if token is not None]
        decoded.faults = [
            RowFault(row.slot_index, causes[row]) for row in causes if not row.is_gone
        ]
        self._remove([row for row in self._rows if row in causes])
        decoded.draft_faults = self._take_draft_faults()
        return decoded

    def _take_draft_faults(self) -> list[DraftFault]:
        proposing = [(row, row.proposals) for row in self._rows if row.proposals is not None]
        faults = [(row, proposals.take_fault()) for row, proposals in proposing]
        return [DraftFault(row.slot_index, fault) for row, fault in faults if fault is not None]

    def _move_on(self, row: DecoderRow, verdict: Verdict) -> BaseException | None:
        """Let a row continue behind its accepted tokens; returns its fault, if any."""
        last = verdict.tokens[-1]
        if last is None:
            return FloatingPointError("the row's logits are not numbers")
        row.finite_passes += 1
        if not verdict.is_finite:
            # Zero times NaN is NaN: masked columns leak into later tokens' attention.
            self._caches.wipe(self._rows.index(row), row.length)
        row.sampling.take(verdict.sampling)
        row.last_token_id = last.token_id
        if row.proposals is not None:
            row.proposals.extend([token.token_id for token in verdict.tokens if token is not None])
        matcher = row.sampling.matcher
        if matcher is None or row.is_gone:
            return None
        try:
            if not matcher.take_forced(1):
                matcher.accept(last.token_id)
        except BaseException as cause:  # noqa: BLE001 - a row's fault, a panic in llguidance included
            return cause
        if matcher.is_done:
            row.sampling.matcher = self._sampler = None
        return None

    def _recompute(self, current: DecodePass) -> DecodePass:
        """Roll back and compute the step again without tokens ahead, on finite caches.

        A NaN in a drafted position leaks into the positions before it through masked attention, because
        0 x NaN is NaN. A row that has it without drafts, too, is at fault itself.
        """
        is_rolled_back = self._caches.roll_back(current.lengths)
        assert is_rolled_back, "a whole pass can be rolled back"
        for place, row in enumerate(current.rows):
            row.length -= current.lengths[place]
            row.passes -= 1
            self._caches.wipe(place, row.length)
        return replace(self._dispatch(), outcomes=_rejected(current))

    def _roll_back(self, current: DecodePass, accepted_tokens: Sequence[int]) -> None:
        """Remove rejected tokens ahead from the caches."""
        kept = [1 + accepted for accepted in accepted_tokens]
        rejected = [length - keep for length, keep in zip(current.lengths, kept, strict=True)]
        for row, count in zip(current.rows, rejected, strict=True):
            row.length -= count
        if not self._caches.roll_back(rejected):
            # Recurrent state is only known as it was before the pass.
            self._passes.compute_again(current, kept)

    def _remove(self, rows: Collection[DecoderRow]) -> None:
        """Remove rows; the last rows move into the gaps, all others keep their places.

        Columns left behind by a row that may hold NaN are wiped. Under look-ahead that is every row:
        a pass is under way when it leaves or moves.
        """
        before = self._rows
        if not any(row in rows for row in before):
            return
        for row in rows:
            if row.proposals is not None:
                row.proposals.close()
        order = _compact([row in rows for row in before])
        self._rows = [before[i] for i in order]
        if not order:
            self._caches.clear()
            return
        suspects = [place for place, row in enumerate(before) if not row.is_finite]
        left = [place for place in suspects if before[place] in rows]
        moved = [place for place in suspects if place >= len(order) and before[place] not in rows]
        for place in left:
            self._caches.wipe(place)
        self._caches.keep(order)
        for place in moved:
            self._caches.wipe(place)


def _verdicts(sampled: Sampled) -> dict[DecoderRow, Verdict]:
    """Wait for the sampled tokens and compare them with the tokens ahead."""
    current = sampled.current
    drafts = dict(zip(current.rows, current.drafts, strict=False))
    verdicts: dict[DecoderRow, Verdict] = {}
    for rows, selection in sampled.parts:
        spans = [drafts.get(row) or Draft((), (row.sampling,)) for row in rows]
        places = [
            (row, one) for row, span in zip(rows, spans, strict=True) for one in span.samplings
        ]
        slot_indices = [row.slot_index for row, _ in places]
        chosen = iter(selection.read(slot_indices, [one.params for _, one in places]))
        for row, span in zip(rows, spans, strict=True):
            tokens = [next(chosen) for _ in span.samplings]
            verdicts[row] = verify(span, tokens)
    return verdicts


def _outcome(row: DecoderRow, draft: Draft, accepted_tokens: int) -> list[DraftOutcome]:
    """Report a draft, without its forced tokens; empty for a row that had none."""
    drafted = len(draft.token_ids) - draft.forced_tokens
    accepted = max(0, accepted_tokens - draft.forced_tokens)
    return [DraftOutcome(row.slot_index, drafted, accepted)] if drafted else []


def _rejected(current: DecodePass) -> list[DraftOutcome]:
    pairs = zip(current.rows, current.drafts, strict=True)
    return [*current.outcomes, *(one for row, draft in pairs for one in _outcome(row, draft, 0))]


def _compact(is_gone: Sequence[bool]) -> list[int]:
    """Return the old place of each row that stays, such that as few as possible move."""
    stays = [i for i, gone in enumerate(is_gone) if not gone]
    count = len(stays)
    fillers = iter(reversed(stays))
    return [next(fillers) if is_gone[place] else place for place in range(count)]
