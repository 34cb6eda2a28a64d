"""One forward pass and one sampling call a step for all rows of a lane.

A forward pass is dispatched first and sampled from afterwards, so that the masks of guided rows are
filled while the device computes. Where the device works beside the program (Metal, CUDA) the decoder
looks ahead as well: the next pass is dispatched from the device's own copy of the tokens before
anyone has read them. On the CPU a dispatch waits for most of the work itself, so looking ahead would
only make every token a step late.

Where a row's grammar leaves no choice, its next tokens are known before they are computed. They go
through one pass together with the token before them, if that is cheaper than a pass each.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from machd.engine.batch_caches import PrefilledRow, RowCaches
from machd.engine.masks import TokenMasks
from machd.engine.mixed import mixed_caches
from machd.engine.protocol import RowFault, SampledToken
from machd.engine.row_planes import StandingRow
from machd.engine.sampling import RowSampling, Sampler, Selection
from machd.engine.untyped import Cache

__all__ = ["Chunk", "Decoder", "DecoderRow", "Forward", "SeeLeaving", "worthwhile_tokens"]

_PASS_TOKENS = 20
"""What a pass costs before its first token, in tokens of one row: 52 ms against 2.6 ms on the CPU
(docs/internals/performance.md). Elsewhere it is more, and more tokens would be worth while."""

_MAX_CERTAIN_TOKENS = 16

_MIN_GAIN = 1.25
"""By how much certain tokens have to pay in theory. A pass of several tokens masks its attention and
computes all their logits, which the reckoning leaves out: at 16 rows what seemed to gain 5 % lost 5."""

_MAX_STRETCH = 2.0
"""How much longer certain tokens of one row may make a pass that others wait for."""

Forward = Callable[[mx.array, list[Any]], mx.array]
"""Token ids int32 [rows, n] and the caches of the model to logits [rows, n, vocabulary]."""

SeeLeaving = Callable[[int, StandingRow], None]
"""Told a slot whose row is about to leave by itself, while its caches are still there."""


@dataclass(slots=True, eq=False)
class DecoderRow:
    """A running row.

    Attributes:
        sampling: Parameters and history; its position counts the tokens chosen so far.
        max_tokens: Tokens that its completion may have.
        is_gone: It has left; a step that is under way computes it for nobody.
        steps: Dispatched with it.
        sound_steps: Of these, read and found to be numbers.
        certain: Tokens that follow the last one without being sampled: part of the next pass.
        length: Positions in the caches, those of a pass under way included.
    """

    slot_index: int
    sampling: RowSampling
    max_tokens: int
    is_gone: bool = False
    steps: int = 0
    sound_steps: int = 0
    certain: tuple[int, ...] = ()
    length: int = 0

    @property
    def has_next(self) -> bool:
        """Whether the row may have another token after those chosen so far."""
        return self.sampling.position < self.max_tokens

    @property
    def is_sound(self) -> bool:
        """Whether its caches are known to hold numbers: all they hold went into tokens read."""
        return 0 < self.sound_steps == self.steps


@dataclass(frozen=True, slots=True)
class _Pass:
    """A forward pass under way.

    Attributes:
        lengths: Tokens that it takes of each row.
        logits: [rows, vocabulary], after each row's last token.
    """

    rows: list[DecoderRow]
    lengths: list[int]
    logits: mx.array


@dataclass(slots=True)
class _Step:
    """What has been sampled from a pass, and the rows whose sampler failed.

    Attributes:
        parts: Rows with the selection of the sampling call that covers them; one part, unless a
            sampler has failed.
        known: Rows whose token was decided beforehand, so that their guides need not be told.
        certain: For rows that have some, the tokens that follow the sampled one.
    """

    parts: list[tuple[list[DecoderRow], Selection]]
    failed: list[tuple[DecoderRow, Exception]]
    known: set[int] = field(default_factory=set)
    certain: dict[int, tuple[int, ...]] = field(default_factory=dict)

    @property
    def rows(self) -> list[DecoderRow]:
        """Those that got a token."""
        return [row for rows, _ in self.parts for row in rows]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Some of a prompt's tokens, and the caches that hold those before them."""

    token_ids: tuple[int, ...]
    caches: Sequence[Cache]


class Decoder:
    """The rows of one lane. Lives on the engine thread."""

    def __init__(
        self,
        forward: Forward,
        caches: RowCaches,
        vocabulary_tokens: int,
        *,
        looks_ahead: bool,
        masks: TokenMasks | None = None,
        see_leaving: SeeLeaving | None = None,
    ) -> None:
        """Begin without rows.

        Args:
            forward: The model.
            caches: Where the rows' keys, values and states will be.
            vocabulary_tokens: Width of the logits.
            looks_ahead: Whether a pass is dispatched before the last one's tokens are read.
            masks: Makes the masks of guided rows; there are none unless given.
            see_leaving: Sees rows that leave by themselves, as those do that have all their tokens
                when looking ahead.
        """
        self._forward = forward
        self._caches = caches
        self._vocabulary_tokens = vocabulary_tokens
        self._looks_ahead = looks_ahead
        self._masks = masks
        self._see_leaving = see_leaving
        self._rows: list[DecoderRow] = []
        self._token_ids = mx.zeros((0,), dtype=mx.int32)
        self._sampler: Sampler | None = None
        self._sampler_rows: list[DecoderRow] = []
        self._ahead: _Pass | None = None

    @property
    def slot_indices(self) -> frozenset[int]:
        """The slots of the rows that the next step computes."""
        return frozenset(row.slot_index for row in self._rows)

    @property
    def kv_bytes(self) -> int:
        """Bytes that the rows' caches hold."""
        return self._caches.nbytes

    @property
    def is_one_token_each(self) -> bool:
        """Whether the next pass takes one token of each row, so that others may share it."""
        return not any(row.certain for row in self._rows)

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

    def decode(self, beside: Chunk | None = None) -> tuple[list[SampledToken], list[RowFault]]:
        """The next token of every row, and those after it that are certain.

        Args:
            beside: A prompt's tokens to compute in the same pass; not with looking ahead, and only
                if the pass is of one token each.

        Returns:
            Tokens or a fault of each row. With looking ahead, a row that joined while a pass was
            under way has neither yet.
        """
        current, self._ahead = self._ahead or self._dispatch(beside), None
        step = self._sample(current)
        if self._looks_ahead:
            step.certain = self._foresee(step.rows)
            self._let_leave()
            self._ahead = self._dispatch() if self._rows else None
        return self._read(step)

    def _let_leave(self) -> None:
        """Rows that have all their tokens leave before the next pass computes them for nobody."""
        leaving = [row for row in self._rows if not row.has_next]
        for row in leaving:
            standing = self.standing(row.slot_index)
            if standing is not None and self._see_leaving is not None:
                self._see_leaving(row.slot_index, standing)
        self._remove(leaving)

    def _dispatch(self, beside: Chunk | None = None) -> _Pass:
        rows = list(self._rows)
        assert rows, "a pass has rows"
        lengths = [1 + len(row.certain) for row in rows]
        longest = max(lengths)
        self._caches.open_step(lengths if longest > 1 else None)
        token_ids, layers = self._token_ids[:, None], self._caches.layers
        if longest > 1:
            certain = [[*row.certain, *[0] * (longest - 1 - len(row.certain))] for row in rows]
            token_ids = mx.concatenate([token_ids, mx.array(certain, dtype=mx.int32)], axis=1)
        if beside is not None:
            assert longest == 1, "a pass with a chunk is of one token each"
            layers = mixed_caches(layers, beside.caches, len(beside.token_ids))
            chunk = mx.array(beside.token_ids, dtype=mx.int32)[:, None]
            token_ids = mx.concatenate([token_ids, chunk])
        logits = self._forward(token_ids, layers)[: len(rows)]
        if longest > 1:
            last = mx.array(lengths, dtype=mx.int32) - 1
            logits = logits[mx.arange(len(rows)), last]
        else:
            logits = logits[:, -1, :]
        for row, length in zip(rows, lengths, strict=True):
            row.steps += 1
            row.length += length
            row.certain = ()
        if self._looks_ahead or any(row.sampling.guide is not None for row in rows):
            mx.async_eval(logits)
        return _Pass(rows, lengths, logits)

    def _sample(self, current: _Pass) -> _Step:
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
        except Exception:  # noqa: BLE001 - the same comes again below, from the row it belongs to
            self._sampler = None
            for row, state in zip(rows, states, strict=True):
                row.sampling.state = state
            step, token_ids = self._sample_alone(rows, logits)
        else:
            step, token_ids = _Step([(rows, selection)], []), selection.token_ids
        mx.async_eval([array for _, selection in step.parts for array in selection.arrays])
        self._take_over(rows, token_ids)
        for row in rows:
            if row.sampling.guide is not None and row.sampling.guide.take_forced(1):
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
            except Exception as cause:  # noqa: BLE001 - a row's fault, whatever it is
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
        """Put certain tokens into the next pass where that makes more tokens in its time.

        Args:
            sampled: Rows that have just got a token, which the certain ones follow. Others may
                have joined since; what is certain of theirs follows a token that is to come.

        Returns:
            Slot index to what the pass takes of the row besides its last token.
        """
        waiting = [_certain_tokens(row) if row in sampled else 0 for row in self._rows]
        if not any(waiting) or not self._caches.takes_several:
            return {}
        longest = worthwhile_tokens(waiting)
        for row, count in zip(self._rows, waiting, strict=True):
            guide = row.sampling.guide
            if guide is not None and count:
                row.certain = tuple(guide.take_forced(min(count, longest - 1)))
                row.sampling.add(row.certain)
        return {row.slot_index: row.certain for row in self._rows if row.certain}

    def _read(self, step: _Step) -> tuple[list[SampledToken], list[RowFault]]:
        faults = [RowFault(row.slot_index, cause) for row, cause in step.failed if not row.is_gone]
        chosen: dict[int, SampledToken] = {}
        for rows, selection in step.parts:
            sound, poisoned = selection.read(
                [row.slot_index for row in rows], [row.sampling.params for row in rows]
            )
            by_slot = {token.slot_index: token for token in sound}
            for row in rows:
                cause = self._judge(row, by_slot.get(row.slot_index), step)
                if row.is_gone:
                    continue
                if cause is None:
                    chosen[row.slot_index] = by_slot[row.slot_index]
                else:
                    faults.append(RowFault(row.slot_index, cause))
            self._remove([row for row in rows if row.slot_index in poisoned])
        faulty = {fault.slot_index for fault in faults}
        self._remove([row for row in self._rows if row.slot_index in faulty])
        certain = step.certain if self._looks_ahead else self._foresee(step.rows)
        tokens: list[SampledToken] = []
        for slot_index, token in chosen.items():
            tokens.append(token)
            tokens += [SampledToken(slot_index, one) for one in certain.get(slot_index, ())]
        return tokens, faults

    def _judge(self, row: DecoderRow, token: SampledToken | None, step: _Step) -> Exception | None:
        """Take a row's token in; returns what is wrong with it."""
        if token is None:
            return FloatingPointError("the row's logits are not numbers")
        row.sound_steps += 1
        guide = row.sampling.guide
        if guide is None or row.is_gone:
            return None
        if row.slot_index not in step.known:
            try:
                guide.see(token.token_id)
            except Exception as cause:  # noqa: BLE001 - a row's fault, whatever it is
                return cause
        if guide.is_done:
            row.sampling.guide = self._sampler = None
        return None

    def _remove(self, rows: Collection[DecoderRow]) -> None:
        """Take rows out; the last ones move into the gaps, all others stay where they are.

        What is not known to be numbers is wiped where it is left behind. Looking ahead, that is so
        of every row: a pass is under way when it leaves or moves.
        """
        before = self._rows
        if not any(row in rows for row in before):
            return
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


def worthwhile_tokens(waiting: Sequence[int]) -> int:
    """How many tokens of each row the next pass takes, so that it makes the most in its time.

    Rows are padded to the longest, so one row's certain tokens cost as much in every row.

    Args:
        waiting: Certain tokens of each row, besides the one that it starts from.
    """
    rows = len(waiting)
    best, best_rate = 1, _MIN_GAIN * rows / (_PASS_TOKENS + rows)
    for tokens in range(2, 2 + min(max(waiting), _MAX_CERTAIN_TOKENS)):
        cost = _PASS_TOKENS + rows * tokens
        if rows > 1 and cost > _MAX_STRETCH * (_PASS_TOKENS + rows):
            break
        rate = (rows + sum(min(one, tokens - 1) for one in waiting)) / cost
        if rate > best_rate:
            best, best_rate = tokens, rate
    return best


def _certain_tokens(row: DecoderRow) -> int:
    """Tokens that a row may take without sampling; none where each has to be looked at."""
    sampling = row.sampling
    if sampling.guide is None or sampling.params.top_logprobs is not None:
        return 0
    return min(len(sampling.guide.forced), row.max_tokens - sampling.position)


def _compact(is_gone: Sequence[bool]) -> list[int]:
    """The old place of each row that stays, such that as few as possible move."""
    stays = [i for i, gone in enumerate(is_gone) if not gone]
    count = len(stays)
    fillers = iter(reversed(stays))
    return [next(fillers) if is_gone[place] else place for place in range(count)]
