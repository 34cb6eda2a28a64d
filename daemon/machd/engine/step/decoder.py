"""One forward pass and one sampling call a step for all rows of a lane.

A forward pass is dispatched first and sampled from afterwards, so that the masks of constrained rows are
filled while the device computes. Where the device works beside the program (Metal, CUDA) the decoder
looks ahead as well: the next pass is dispatched from the device's own copy of the tokens before
anyone has read them. On the CPU a dispatch waits for most of the work itself, so looking ahead would
only make every token a step late.

Where a row's grammar leaves no choice, its next tokens are known before they are computed. They go
through one pass together with the token before them, if that is cheaper than a pass each. So do tokens
that somebody guesses, and then every position of the pass is sampled, to see how many were right.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx

from machd.engine.grammar.masks import TokenMasks
from machd.engine.kv.row_caches import PrefilledRow, RowCaches
from machd.engine.kv.row_planes import StandingRow
from machd.engine.protocol.step import DraftFault, DraftOutcome, RowFault, SampledToken
from machd.engine.speculation.drafting import Drafting
from machd.engine.step.decode_pass import Chunk, DecodePass, Forward, Passes
from machd.engine.step.decoder_row import Decoded, DecoderRow
from machd.engine.step.forced_tokens import forced_tokens, worthwhile_tokens
from machd.engine.step.sampling import Sampler, Selection
from machd.engine.step.verification import Draft, Verdict, draft_of, verify

SeeLeaving = Callable[[int, StandingRow], None]
"""Told a slot whose row is about to leave by itself, while its caches are still there."""


@dataclass(slots=True)
class _Step:
    """What has been sampled from a pass, and the rows whose sampler failed.

    Attributes:
        parts: Rows with the selection of the sampling call that covers them; one part, unless a
            sampler has failed.
        known: Rows whose token was decided beforehand, so that their matchers need not be told.
        forced: For rows that have some, the tokens that follow the sampled one.
    """

    parts: list[tuple[list[DecoderRow], Selection]]
    failed: list[tuple[DecoderRow, BaseException]]
    known: set[int] = field(default_factory=set)
    forced: dict[int, tuple[int, ...]] = field(default_factory=dict)

    @property
    def rows(self) -> list[DecoderRow]:
        """Those that got a token."""
        return [row for rows, _ in self.parts for row in rows]


class Decoder:
    """The rows of one lane. Lives on the engine thread."""

    def __init__(  # noqa: PLR0913 - what stands around a lane, each by its name
        self,
        forward: Forward,
        caches: RowCaches,
        vocabulary_tokens: int,
        *,
        looks_ahead: bool,
        masks: TokenMasks | None = None,
        see_leaving: SeeLeaving | None = None,
        drafting: Drafting | None = None,
    ) -> None:
        """Begin without rows.

        Args:
            forward: The model.
            caches: Where the rows' keys, values and states will be.
            vocabulary_tokens: Width of the logits.
            looks_ahead: Whether a pass is dispatched before the last one's tokens are read.
            masks: Makes the masks of constrained rows; there are none unless given.
            see_leaving: Sees rows that leave by themselves, as those do that have all their tokens
                when looking ahead.
            drafting: Guesses what rows say next; nobody does unless given.
        """
        self._passes = Passes(forward, caches, is_eager=looks_ahead)
        self._caches = caches
        self._vocabulary_tokens = vocabulary_tokens
        self._looks_ahead = looks_ahead
        self._masks = masks
        self._see_leaving = see_leaving
        self._drafting = drafting
        self._rows: list[DecoderRow] = []
        self._token_ids = mx.zeros((0,), dtype=mx.int32)
        self._sampler: Sampler | None = None
        self._sampler_rows: list[DecoderRow] = []
        self._ahead: DecodePass | None = None

    @property
    def slot_indices(self) -> frozenset[int]:
        """The slots of the rows that the next step computes."""
        return frozenset(row.slot_index for row in self._rows)

    @property
    def kv_bytes(self) -> int:
        """Bytes that the rows' caches hold, those for guessing included."""
        guessing = sum(row.drafting.kv_bytes for row in self._rows if row.drafting is not None)
        return self._caches.nbytes + guessing

    @property
    def is_one_token_each(self) -> bool:
        """Whether the next pass takes one token of each row, so that others may share it."""
        return not any(row.forced for row in self._rows)

    def growth_bytes(
        self, joining: Sequence[tuple[int, int]], tokens: int, bytes_per_token: int
    ) -> int:
        """Bytes that the next pass allocates for the rows' caches; see :class:`RowCaches`."""
        known_tokens = max((len(row.forced) for row in self._rows), default=0)
        return self._caches.growth_bytes(joining, tokens + known_tokens, bytes_per_token)

    def standing(self, slot_index: int) -> StandingRow | None:
        """Where a slot's row is and how far; None if it has left.

        What a pass under way computes does not count: nobody has seen yet whether it is numbers.
        """
        under_way = self._ahead
        for index, row in enumerate(self._rows):
            if row.slot_index == slot_index:
                ahead = 0
                if under_way is not None and row in under_way.rows:
                    ahead = under_way.lengths[under_way.rows.index(row)]
                return StandingRow(self._caches.layers, index, row.length - ahead, not ahead)
        return None

    def join(self, row: DecoderRow, prefilled: PrefilledRow) -> None:
        """Add a row whose prompt is computed but for its last token."""
        self._caches.join(prefilled)
        token_id = mx.array([prefilled.last_token_id], dtype=mx.int32)
        self._token_ids = mx.concatenate([self._token_ids, token_id])
        row.length = prefilled.length
        self._rows.append(row)

    def leave(self, slot_indices: Collection[int]) -> None:
        """Drop rows; a pass that is under way no longer counts for them."""
        under_way = self._ahead.rows if self._ahead is not None else []
        for row in under_way:
            row.is_gone |= row.slot_index in slot_indices
        if all(row.is_gone for row in under_way):
            self._ahead = None  # who joins now need not wait for it
        self._remove([row for row in self._rows if row.slot_index in slot_indices])

    def close(self) -> None:
        """Its rows are forgotten: hold nothing that is not of this lane alone."""
        _end_drafting(self._rows)

    def decode(self, beside: Chunk | None = None, *, max_draft_tokens: int = 0) -> Decoded:
        """The next token of every row, those forced after it, and those guessed rightly.

        Args:
            beside: A prompt's tokens to compute in the same pass; not with looking ahead, and only
                if the pass is of one token each.
            max_draft_tokens: Tokens that may be guessed for each row; not with a chunk beside.

        Returns:
            Tokens or a fault of each row. With looking ahead, a row that joined while a pass was
            under way has neither yet.
        """
        if self._drafting is not None:
            self._drafting.begin_pass()
        pacings = [row.drafting for row in self._rows if row.drafting is not None]
        drafts = self._draft(max_draft_tokens) if self._ahead is None else []
        if drafts:
            current = self._passes.dispatch_drafted(self._rows, self._token_ids, drafts)
            decoded = self._decode_drafted(current, drafts)
        else:
            current, self._ahead = self._ahead or self._dispatch(beside), None
            decoded = self._decode_plainly(current, max_draft_tokens=max_draft_tokens)
        if self._drafting is not None and beside is None:
            self._drafting.observe_pass(pacings, max(current.lengths))
        return decoded

    def _decode_plainly(self, current: DecodePass, *, max_draft_tokens: int) -> Decoded:
        step = self._sample(current)
        if self._looks_ahead:
            step.forced = self._foresee(step.rows)
            self._let_leave()
            if self._rows and not (max_draft_tokens and self._expects_guess()):
                self._ahead = self._dispatch()
        return self._read(step)

    def _expects_guess(self) -> bool:
        """Whether a guess may follow the next token, so that it has to be seen before a next pass."""
        drafting = self._drafting
        if drafting is None or not self._caches.takes_drafts:
            return False
        rows = [row.drafting for row in self._rows if row.drafting is not None]
        return drafting.expects_guess(rows)

    def _draft(self, max_tokens: int) -> list[Draft]:
        """What is guessed for each row, as far as it pays; empty where nothing is for any of them."""
        drafting = self._drafting
        if drafting is None or max_tokens < 1 or not self._caches.takes_drafts:
            return []
        rows = [row.drafting for row in self._rows if row.drafting is not None]
        most = min(max_tokens, self._room_tokens)
        # After its guesses a row says one token more.
        limits = [max(0, min(most, row.tokens_left - 1)) for row in self._rows]
        proposed = drafting.guess(rows, limits)
        lengths = drafting.worthwhile_tokens(rows, [len(guess) for guess in proposed])
        if not any(lengths):
            return []
        try:
            drafts = [
                draft_of(row.sampling, guess, length)
                for row, guess, length in zip(self._rows, proposed, lengths, strict=True)
            ]
        except BaseException as cause:  # noqa: BLE001 - a panic in a grammar that looked ahead
            for row in self._rows:
                if row.sampling.matcher is not None and row.drafting is not None:
                    row.drafting.fail(cause)
            return []
        return drafts if any(draft.token_ids for draft in drafts) else []

    @property
    def _room_tokens(self) -> int:
        """Guesses that a pass may have, so that padding needs no more columns than rows were promised."""
        begins = [row.length + 1 + len(row.forced) for row in self._rows]
        ends = [begin + row.tokens_left for begin, row in zip(begins, self._rows, strict=True)]
        longest = max(row.length for row in self._rows) + 1
        return max(ends) - longest - max(len(row.forced) for row in self._rows)

    def _decode_drafted(self, current: DecodePass, drafts: Sequence[Draft]) -> Decoded:
        """What comes of a pass over every row's last token and its guesses."""
        slot_indices = [row.slot_index for row in current.rows]
        try:
            verdicts = verify(
                drafts, slot_indices, current.logits, self._vocabulary_tokens, self._masks
            )
        except BaseException as cause:  # noqa: BLE001 - without guesses it comes again, from its own row
            return self._decode_undrafted(current, drafts, cause)
        if not all(one.tokens[-1] for one in verdicts):
            return self._decode_again(current, drafts)
        self._take_back(current, drafts, [one.accepted_tokens for one in verdicts])
        return self._conclude(current.rows, drafts, verdicts)

    def _decode_undrafted(
        self, current: DecodePass, drafts: Sequence[Draft], cause: BaseException
    ) -> Decoded:
        """Go on as if nothing had been guessed; constrained rows, of which it may be, are not guessed for."""
        self._take_back(current, drafts, [0 for _ in drafts])
        places = [0]
        for draft in drafts[:-1]:
            places.append(places[-1] + len(draft.samplings))
        logits = current.logits[mx.array(places, dtype=mx.int32)]
        decoded = Decoded()
        for row, draft in zip(current.rows, drafts, strict=True):
            self._note_outcome(decoded, row, len(draft.token_ids), 0)
            if row.sampling.matcher is not None and row.drafting is not None and draft.token_ids:
                row.drafting.fail(cause)
        decoded.add(self._read(self._sample(replace(current, logits=logits))))
        return decoded

    def _decode_again(self, current: DecodePass, drafts: Sequence[Draft]) -> Decoded:
        """Compute a pass anew without its guesses, of which some may have made what is no number.

        Attention weighs a later token's values with zero, which of those that are no numbers makes
        others of their kind: so they reach the tokens before them.
        """
        is_back = self._caches.take_back(current.lengths)
        assert is_back, "a whole pass can be taken back"
        decoded = Decoded()
        token_ids: Any = current.token_ids.tolist()
        for place, (row, draft) in enumerate(zip(current.rows, drafts, strict=True)):
            forced = current.lengths[place] - len(draft.token_ids)
            row.length -= current.lengths[place]
            row.steps -= 1
            row.forced = tuple(token_ids[place][1:forced])
            self._caches.wipe(place, row.length)
            self._note_outcome(decoded, row, len(draft.token_ids), 0)
        decoded.add(self._decode_plainly(self._dispatch(), max_draft_tokens=0))
        return decoded

    def _note_outcome(self, decoded: Decoded, row: DecoderRow, drafted: int, accepted: int) -> None:
        if row.drafting is not None and drafted and self._drafting is not None:
            decoded.drafts.append(DraftOutcome(row.slot_index, drafted, accepted))
            self._drafting.observe_verdict(row.drafting, drafted, accepted)

    def _take_back(
        self, current: DecodePass, drafts: Sequence[Draft], accepted_tokens: Sequence[int]
    ) -> None:
        """Take guesses that were wrong out of the caches."""
        rejected = [
            len(draft.token_ids) - accepted
            for draft, accepted in zip(drafts, accepted_tokens, strict=True)
        ]
        kept = [length - count for length, count in zip(current.lengths, rejected, strict=True)]
        for row, count in zip(current.rows, rejected, strict=True):
            row.length -= count
        if not self._caches.take_back(rejected):
            # They are as before the pass, which is computed again as far as it was right.
            self._passes.compute_again(current, kept)

    def _conclude(
        self, rows: Sequence[DecoderRow], drafts: Sequence[Draft], verdicts: Sequence[Verdict]
    ) -> Decoded:
        """Let every row go on from what it has said."""
        decoded = Decoded()
        last = [one.tokens[-1] for one in verdicts]
        next_ids = [0 if token is None else token.token_id for token in last]
        self._token_ids = mx.array(next_ids, dtype=mx.int32)
        for place, (row, draft, verdict) in enumerate(zip(rows, drafts, verdicts, strict=True)):
            self._note_outcome(decoded, row, len(draft.token_ids), verdict.accepted_tokens)
            if not verdict.is_clean:
                self._caches.wipe(place, row.length)
            row.sampling.take(verdict.sampling)
            matcher = row.sampling.matcher
            is_known = matcher is not None and bool(matcher.take_forced(1))
            cause = self._judge(row, last[place], is_known=is_known)
            if cause is not None:
                decoded.faults.append(RowFault(row.slot_index, cause))
                continue
            decoded.tokens += [token for token in verdict.tokens if token is not None]
        self._drop_faulty(decoded)
        return self._tell(decoded, self._foresee(rows))

    def _let_leave(self) -> None:
        """Rows that have all their tokens leave before the next pass computes them for nobody."""
        leaving = [row for row in self._rows if row.tokens_left < 1]
        for row in leaving:
            standing = self.standing(row.slot_index)
            if standing is not None and self._see_leaving is not None:
                self._see_leaving(row.slot_index, standing)
        self._remove(leaving)

    def _dispatch(self, beside: Chunk | None = None) -> DecodePass:
        return self._passes.dispatch(self._rows, self._token_ids, beside)

    def _sample(self, current: DecodePass) -> _Step:
        """All rows in one call; if it fails, each row alone, to find out whose fault it is."""
        rows, logits = current.rows, current.logits
        stays = [i for i, row in enumerate(rows) if not row.is_gone]
        if len(stays) < len(rows):
            rows, logits = [rows[i] for i in stays], logits[mx.array(stays, dtype=mx.int32)]
        states = [row.sampling.state for row in rows]
        try:
            if self._sampler is None or self._sampler_rows != rows:
                samplings = [row.sampling for row in rows]
                self._sampler = Sampler(samplings, self._vocabulary_tokens, self._masks)
                self._sampler_rows = rows
            selection = self._sampler.sample(logits)
        except BaseException:  # noqa: BLE001 - the same comes again below, from the row it belongs to
            self._sampler = None
            for row, state in zip(rows, states, strict=True):
                row.sampling.state = state
            step, token_ids = self._sample_alone(rows, logits)
        else:
            step, token_ids = _Step([(rows, selection)], []), selection.token_ids
        mx.async_eval([array for _, selection in step.parts for array in selection.arrays])
        self._take_over(rows, token_ids)
        for row in rows:
            if row.sampling.matcher is not None and row.sampling.matcher.take_forced(1):
                step.known.add(row.slot_index)
        self._remove([row for row, _ in step.failed])
        return step

    def _sample_alone(self, rows: Sequence[DecoderRow], logits: mx.array) -> tuple[_Step, mx.array]:
        step = _Step([], [])
        token_ids = []
        for i, row in enumerate(rows):
            try:
                sampler = Sampler([row.sampling], self._vocabulary_tokens, self._masks)
                selection = sampler.sample(logits[i : i + 1])
            except BaseException as cause:  # noqa: BLE001 - a row's fault, a panic in llguidance included
                step.failed.append((row, cause))
                token_ids.append(mx.zeros((1,), dtype=mx.int32))
            else:
                step.parts.append(([row], selection))
                token_ids.append(selection.token_ids)
        return step, mx.concatenate(token_ids)

    def _take_over(self, rows: list[DecoderRow], token_ids: mx.array) -> None:
        """Let the next pass start from new tokens; who joined in between keeps the one it has."""
        if rows == self._rows:
            self._token_ids = token_ids
            return
        places = {id(row): place for place, row in enumerate(rows)}
        order = [places.get(id(row), len(rows) + i) for i, row in enumerate(self._rows)]
        both = mx.concatenate([token_ids, self._token_ids])
        self._token_ids = both[mx.array(order, dtype=mx.int32)]

    def _foresee(self, sampled: Collection[DecoderRow]) -> dict[int, tuple[int, ...]]:
        """Put forced tokens into the next pass where that makes more tokens in its time.

        Args:
            sampled: Rows that have just got a token, which the forced ones follow. Others may
                have joined since; what is forced of theirs follows a token that is to come.

        Returns:
            Slot index to what the pass takes of the row besides its last token.
        """
        waiting = [
            forced_tokens(row.sampling, row.max_tokens) if row in sampled else 0
            for row in self._rows
        ]
        if not any(waiting) or not self._caches.takes_several:
            return {}
        longest = worthwhile_tokens(waiting)
        for row, count in zip(self._rows, waiting, strict=True):
            matcher = row.sampling.matcher
            if matcher is not None and count:
                row.forced = tuple(matcher.take_forced(min(count, longest - 1)))
                row.sampling.add(row.forced)
        return {row.slot_index: row.forced for row in self._rows if row.forced}

    def _read(self, step: _Step) -> Decoded:
        faults = [RowFault(row.slot_index, cause) for row, cause in step.failed if not row.is_gone]
        decoded = Decoded(faults=faults)
        for rows, selection in step.parts:
            sound, poisoned = selection.read(
                [row.slot_index for row in rows], [row.sampling.params for row in rows]
            )
            by_slot = {token.slot_index: token for token in sound}
            for row in rows:
                token = by_slot.get(row.slot_index)
                cause = self._judge(row, token, is_known=row.slot_index in step.known)
                if row.is_gone:
                    continue
                if cause is not None:
                    decoded.faults.append(RowFault(row.slot_index, cause))
                elif token is not None:
                    decoded.tokens.append(token)
            self._remove([row for row in rows if row.slot_index in poisoned])
        self._drop_faulty(decoded)
        return self._tell(decoded, step.forced if self._looks_ahead else self._foresee(step.rows))

    def _drop_faulty(self, decoded: Decoded) -> None:
        faulty = {fault.slot_index for fault in decoded.faults}
        self._remove([row for row in self._rows if row.slot_index in faulty])

    def _tell(self, decoded: Decoded, forced: Mapping[int, tuple[int, ...]]) -> Decoded:
        """Add the forced tokens to those that were chosen, and let guessing know of both."""
        said: dict[int, list[SampledToken]] = {}
        for token in decoded.tokens:
            said.setdefault(token.slot_index, []).append(token)
        for slot_index, tokens in said.items():
            tokens += [SampledToken(slot_index, one) for one in forced.get(slot_index, ())]
        decoded.tokens = [token for tokens in said.values() for token in tokens]
        for row in self._rows:
            if row.drafting is not None:
                row.drafting.extend([one.token_id for one in said.get(row.slot_index, ())])
                if (cause := row.drafting.take_fault()) is not None:
                    decoded.draft_faults.append(DraftFault(row.slot_index, cause))
        return decoded

    def _judge(
        self, row: DecoderRow, token: SampledToken | None, *, is_known: bool
    ) -> BaseException | None:
        """Take a row's token in; returns what is wrong with it.

        Args:
            row: It.
            token: None where the logits are not numbers.
            is_known: Whether it was decided beforehand, so that the matcher need not be told.
        """
        if token is None:
            return FloatingPointError("the row's logits are not numbers")
        row.sound_steps += 1
        matcher = row.sampling.matcher
        if matcher is None or row.is_gone:
            return None
        if not is_known:
            try:
                matcher.accept(token.token_id)
            except BaseException as cause:  # noqa: BLE001 - a row's fault, a panic in llguidance included
                return cause
        if matcher.is_done:
            row.sampling.matcher = self._sampler = None
        return None

    def _remove(self, rows: Collection[DecoderRow]) -> None:
        """Take rows out; the last ones move into the gaps, all others stay where they are.

        What is not known to be numbers is wiped where it is left behind. Looking ahead, that is so
        of every row: a pass is under way when it leaves or moves.
        """
        before = self._rows
        if not any(row in rows for row in before):
            return
        _end_drafting(row for row in before if row in rows)
        order = _compact([row in rows for row in before])
        self._rows = [before[i] for i in order]
        self._token_ids = self._token_ids[mx.array(order, dtype=mx.int32)]
        if not order:
            self._caches.clear()
            return
        suspects = [place for place, row in enumerate(before) if not row.is_sound]
        for place in suspects:
            if before[place] in rows:
                self._caches.wipe(place)
        self._caches.keep(order)
        for place in suspects:
            if place >= len(order) and before[place] not in rows:
                self._caches.wipe(place)


def _end_drafting(rows: Iterable[DecoderRow]) -> None:
    for row in rows:
        if row.drafting is not None:
            row.drafting.close()


def _compact(is_gone: Sequence[bool]) -> list[int]:
    """The old place of each row that stays, such that as few as possible move."""
    stays = [i for i, gone in enumerate(is_gone) if not gone]
    count = len(stays)
    fillers = iter(reversed(stays))
    return [next(fillers) if is_gone[place] else place for place in range(count)]
