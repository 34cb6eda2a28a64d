"""Decoding of a lane's rows, one step at a time: read :meth:`Decoder.decode` first.

choose -> Span, dispatch -> DecodePass, sample -> Sampled (Selection), settle -> Verdict, Decoded (SettledRow), apply.

Every row has a span in a step: its last token, whose keys and values are not computed yet, and tokens
ahead of it. Tokens ahead are forced (dictated by the row's grammar) or drafts (proposed). All spans go
through one forward pass, every position is sampled as if it were decoded alone, and the caches are rolled
back to the last token that was right. A row without tokens ahead has a span of one.

The forward pass is dispatched before it is sampled, so that grammar masks are filled while the device
computes. With look-ahead the same verbs run in another order, which overlaps whole steps as well.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import mlx.core as mx

from machd.engine.kv.lane_kv import CachedRow, JoiningRow, LaneKv, PrefilledRow
from machd.engine.protocol.step import DecodeRow, DraftFault, DraftOutcome, RowFault, SpanCost
from machd.engine.sampling.sampler import Masks, Sampler, Selection
from machd.engine.sampling.sampling_state import SamplingState
from machd.engine.step.decode_pass import Chunk, DecodePass, Passes
from machd.engine.step.ports import Decider
from machd.engine.step.row import Decoded, DecoderRow, SettledRow
from machd.engine.step.span_choice import MAX_FORCED_TOKENS, choose_spans, expects_tokens_ahead
from machd.engine.step.verification import Span, Verdict, verify


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
        masks: Masks,
        decider: Decider,
        keep_finished: Callable[[int, CachedRow], None],
    ) -> None:
        """Begin without rows.

        Args:
            passes: Forward passes over the lane's rows. Those that start at once are dispatched before the
                tokens of the last one are read: look-ahead.
            kv: Keys, values and states of the rows.
            vocabulary_tokens: Width of the logits.
            masks: Fills the masks of rows with a grammar.
            decider: Decides each row's span, and what it keeps of a pass.
            keep_finished: With look-ahead, takes the slot and the caches of a row that has its last token.
        """
        self._passes = passes
        self._kv = kv
        self._vocabulary_tokens = vocabulary_tokens
        self._masks = masks
        self._decider = decider
        self._keep_finished = keep_finished
        self._under_way: DecodePass | None = None
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
        return self._kv.nbytes + sum(row.proposals.kv_bytes for row in self._rows)

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
        """Locate a slot's row, without a pass under way: its logits may not be finite. None if it has left."""
        for index, row in enumerate(self._rows):
            if row.slot_index == slot_index:
                if self._under_way is not None and row in self._under_way.rows:
                    return replace(self._kv.locate(index, row.length - 1), is_exact=False)
                return self._kv.locate(index, row.length)
        return None

    def join(self, row: DecoderRow, prefilled: PrefilledRow) -> None:
        """Add a row whose prompt is computed but for its last token."""
        self._kv.join(prefilled)
        row.last_token_id, row.length = prefilled.last_token_id, prefilled.length
        self._rows.append(row)

    def leave(self, slot_indices: Collection[int]) -> None:
        """Remove rows."""
        self.remove([row for row in self._rows if row.slot_index in slot_indices])

    def decode(
        self, plan_rows: Mapping[int, DecodeRow], cost: SpanCost, chunks: Sequence[Chunk] = ()
    ) -> Decoded:
        """Decode all rows of the lane, at least one: each gets its accepted tokens ahead and one token more.

        Args:
            plan_rows: The plan's rows by slot; a row that joined in this step may be missing, and decodes too.
            cost: Cost of tokens ahead.
            chunks: Chunks of prompts to compute in the same pass, which has no tokens ahead then.

        Returns:
            Tokens or a fault for each row; with look-ahead, neither for a row that has just joined.
        """
        if self._passes.looks_ahead:
            assert not chunks, "the pass is under way before its chunks are known"
            return self._decode_with_look_ahead(plan_rows, cost)
        spans = [] if chunks else self.choose(plan_rows, cost)
        return self._finish(self.dispatch(spans, chunks))

    def _decode_with_look_ahead(
        self, plan_rows: Mapping[int, DecodeRow], cost: SpanCost
    ) -> Decoded:
        """Sample the pass under way, dispatch the next one, then read the tokens.

        On Metal and CUDA the device then computes while the program reads tokens, fills masks and plans. On
        the CPU a dispatch waits for most of the work itself, so it would only make every token a step late.
        Where tokens ahead are expected, the next pass is not dispatched: they follow tokens that have to be
        read. A row that joined while a pass was under way has neither a token nor a fault yet. Ranks
        never look ahead, so results are settled without the decider.
        """
        current, self._under_way = self._under_way, None
        if current is None:
            current = self.dispatch(self.choose(plan_rows, cost))
        current = _of_present_rows(current)
        while (sampled := self.sample(current)) is None:
            current = self.recompute(current)
        if current.longest == 1:
            self.remove([row for row, _ in sampled.failed])
            self._remove_finished(sampled.rows)
            if self._rows and not expects_tokens_ahead(self._rows, self._kv, plan_rows, cost):
                next_ids = _next_ids(self._rows, sampled)
                self._under_way = self._passes.dispatch(self._rows, next_ids)
        if (decoded := self.settle(sampled)) is None:
            return self._finish(self.recompute(current))
        return self.apply(current, decoded)

    def _finish(self, current: DecodePass) -> Decoded:
        """Sample a pass, or the plain one that takes its place, and let rows keep what is right of it."""
        while (decoded := self._decider.agree_on_result(current, self._sample_and_settle)) is None:
            current = self.recompute(current)
        return self.apply(current, decoded)

    def _sample_and_settle(self, current: DecodePass) -> Decoded | None:
        sampled = self.sample(current)
        return None if sampled is None else self.settle(sampled)

    def _remove_finished(self, rows: Sequence[DecoderRow]) -> None:
        """Remove those of ``rows`` whose token, sampled and not read, is the last, so that the next pass skips them."""
        finished = [row for row in rows if row.tokens_left <= 1]
        for row in finished:
            cached_row = self.cached_row(row.slot_index)
            if cached_row is not None:
                self._keep_finished(row.slot_index, cached_row)
        self.remove(finished)

    def choose(self, plan_rows: Mapping[int, DecodeRow], cost: SpanCost) -> list[Span]:
        """Have each row's span decided; empty for plain ones."""
        choose = partial(choose_spans, self._rows, self._kv, plan_rows, cost)
        return self._decider.agree_on_spans(choose, len(self._rows))

    def dispatch(self, spans: Sequence[Span] = (), chunks: Sequence[Chunk] = ()) -> DecodePass:
        """Dispatch the pass over every row's span, on tokens that have been read."""
        last_ids = mx.array([row.last_token_id for row in self._rows], dtype=mx.int32)
        return self._passes.dispatch(self._rows, last_ids, spans, chunks)

    def sample(self, current: DecodePass) -> Sampled | None:
        """Sample every position in one call.

        If that raises with tokens ahead, rows with both a grammar and a proposer have no more drafts, and the
        pass is to be computed again without tokens ahead: None. In a plain pass each row is then sampled alone.
        """
        pairs = zip(current.rows, current.spans, strict=True)
        states = [one for row, span in pairs for one in row.states(span)]
        sampled: Sampled | None = None
        try:
            selection = self._sampler_of(current, states).sample(states, current.logits)
            sampled = Sampled(current, [(current.rows, selection)], [])
        except BaseException as cause:  # noqa: BLE001 - if it comes again without tokens ahead, it is its row's
            if current.longest > 1:
                for row in current.rows:  # a grammar may fail on a drafted path alone
                    if row.sampling.matcher is not None and row.proposals.is_active:
                        row.proposals.fail(cause)
                return None
        sampled = sampled or self._sample_each(current)
        mx.async_eval([array for _, selection in sampled.parts for array in selection.arrays])
        return sampled

    def _sampler_of(self, current: DecodePass, states: Sequence[SamplingState]) -> Sampler:
        """Return a pass's sampler: a plain pass over the same rows as the last plain one has the same."""
        is_plain = current.longest == 1
        if is_plain and self._sampler is not None and self._sampler_rows == current.rows:
            return self._sampler
        sampler = Sampler([one.params for one in states], self._vocabulary_tokens, self._masks)
        if is_plain:
            self._sampler, self._sampler_rows = sampler, current.rows
        return sampler

    def _sample_each(self, current: DecodePass) -> Sampled:
        """Sample each row of a plain pass alone, and so find the one whose sampler raises."""
        sampled = Sampled(current, [], [])
        for place, row in enumerate(current.rows):
            try:
                sampler = Sampler([row.sampling.params], self._vocabulary_tokens, self._masks)
                selection = sampler.sample([row.sampling], current.logits[place : place + 1])
            except BaseException as cause:  # noqa: BLE001 - a row's fault, a panic in llguidance included
                sampled.failed.append((row, cause))
            else:
                sampled.parts.append(([row], selection))
        return sampled

    def recompute(self, current: DecodePass) -> DecodePass:
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
        return replace(self.dispatch(), outcomes=tuple(rejected))

    def settle(self, sampled: Sampled) -> Decoded | None:
        """Read the sampled tokens and move every row on; None if tokens ahead may be to blame for a NaN."""
        current, verdicts = sampled.current, _verdicts(sampled)
        if current.longest > 1 and any(one.tokens[-1] is None for one in verdicts.values()):
            return None
        decoded = Decoded(drafts=list(current.outcomes), span_tokens=current.longest)
        causes = dict(sampled.failed)
        for row, span in zip(current.rows, current.spans, strict=True):
            if (verdict := verdicts.get(row)) is None:
                continue
            decoded.drafts += _outcome(row, span, verdict.accepted_tokens)
            if (cause := _move_on(row, span, verdict)) is not None:
                causes[row] = cause
            else:
                decoded.tokens += [token for token in verdict.tokens if token is not None]
        decoded.faults = [RowFault(row.slot_index, cause) for row, cause in causes.items()]
        decoded.settled = [
            _settled(verdicts.get(row), has_failed=row in causes) for row in current.rows
        ]
        return decoded

    def apply(self, current: DecodePass, decoded: Decoded) -> Decoded:
        """Apply a result: roll back what rows do not keep, and remove those that failed; returns the whole result."""
        if current.longest > 1:
            self._roll_back(current, [one.kept_tokens for one in decoded.settled])
        pairs = list(zip(current.rows, decoded.settled, strict=True))
        for row, one in pairs:
            if one.last_token_id is None:
                continue
            row.last_token_id = one.last_token_id
            if not one.is_finite:
                # Zero times NaN is NaN: masked columns leak into later tokens' attention. Only after a padded
                # pass, before which look-ahead removes no row.
                self._kv.wipe(self._rows.index(row), row.length)
        self.remove([row for row, one in pairs if one.has_failed])
        # A row that leaves with a fault of its own reports that alone.
        faults = [(row, row.proposals.take_fault()) for row in self._rows]
        decoded.draft_faults = [
            DraftFault(row.slot_index, one) for row, one in faults if one is not None
        ]
        return decoded

    def _roll_back(self, current: DecodePass, kept: Sequence[int]) -> None:
        """Remove rejected tokens ahead from the caches."""
        rejected = [span.length - count for span, count in zip(current.spans, kept, strict=True)]
        for row, count in zip(current.rows, rejected, strict=True):
            row.length -= count
        if not self._kv.roll_back(rejected):
            # Recurrent state is only known as it was before the pass.
            self._passes.compute_again(current, kept)

    def remove(self, rows: Collection[DecoderRow]) -> None:
        """Remove rows; the last rows move into the gaps, all others keep their places."""
        before = self._rows
        if not any(row in rows for row in before):
            return
        for row in rows:
            row.is_gone = True
            row.proposals.close()
        if self._under_way is not None and all(row.is_gone for row in self._under_way.rows):
            self._under_way = None  # a row that joins now need not wait for it
        order = _compact([row.is_gone for row in before])
        self._rows = [before[place] for place in order]
        if order:
            self._kv.select(order)
        else:
            self._kv.clear()


def _move_on(row: DecoderRow, span: Span, verdict: Verdict) -> BaseException | None:
    """Let a row continue behind its last right token; returns its fault, if any."""
    last = verdict.tokens[-1]
    if last is None:
        return FloatingPointError("the row's logits are not numbers")
    row.proposals.extend([token.token_id for token in verdict.tokens if token is not None])
    try:
        row.sampling = row.states(span)[verdict.accepted_tokens].after([last.token_id])
    except BaseException as cause:  # noqa: BLE001 - a row's fault, a panic in llguidance included
        return cause
    return None


def _verdicts(sampled: Sampled) -> dict[DecoderRow, Verdict]:
    """Wait for the sampled tokens and compare them with the tokens ahead."""
    spans = dict(zip(sampled.current.rows, sampled.current.spans, strict=True))
    verdicts: dict[DecoderRow, Verdict] = {}
    for rows, selection in sampled.parts:
        slot_indices = [row.slot_index for row in rows for _ in range(spans[row].length)]
        chosen = selection.read(slot_indices)
        begin = 0
        for row in rows:
            span = spans[row]
            verdicts[row] = verify(span, chosen[begin : begin + span.length])
            begin += span.length
    return verdicts


def _of_present_rows(current: DecodePass) -> DecodePass:
    """Drop rows that left while the pass was under way; its spans are plain."""
    stays = [place for place, row in enumerate(current.rows) if not row.is_gone]
    if len(stays) == len(current.rows):
        return current
    rows = [current.rows[place] for place in stays]
    spans = [current.spans[place] for place in stays]
    logits = current.logits[mx.array(stays, dtype=mx.int32)]
    return replace(current, rows=rows, spans=spans, logits=logits)


def _next_ids(rows: Sequence[DecoderRow], sampled: Sampled) -> mx.array:
    """Input of the next pass, int32 [rows]: the sampled tokens, on the device and unread.

    Rows that joined since the pass was dispatched begin with the last token of their prompt.
    """
    ids = [selection.token_ids for _, selection in sampled.parts]
    places = {row: place for place, row in enumerate(sampled.rows)}
    joined = [row for row in rows if row not in places]
    places |= {row: len(places) + place for place, row in enumerate(joined)}
    ids.append(mx.array([row.last_token_id for row in joined], dtype=mx.int32))
    order = [places[row] for row in rows]
    return mx.concatenate(ids)[mx.array(order, dtype=mx.int32)]


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
