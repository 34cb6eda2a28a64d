"""One forward pass and one sampling call a step for all rows of a lane.

Where the device works beside the program (Metal, CUDA) the decoder looks ahead: the next step is
dispatched from the device's own copy of the tokens before anyone has read them. On the CPU a
dispatch waits for most of the work itself, so looking ahead would only make every token a step late.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from machd.engine.batch_caches import PrefilledRow, RowCaches
from machd.engine.mixed import mixed_caches
from machd.engine.protocol import RowFault, SampledToken
from machd.engine.sampling import RowSampling, Sampler, Selection
from machd.engine.untyped import Cache

__all__ = ["Chunk", "Decoder", "DecoderRow", "Forward"]

Forward = Callable[[mx.array, list[Any]], mx.array]
"""Token ids int32 [rows, n] and the caches of the model to logits [rows, n, vocabulary]."""


@dataclass(slots=True, eq=False)
class DecoderRow:
    """A running row.

    Attributes:
        sampling: Parameters and history; its position counts the tokens chosen so far.
        max_tokens: Tokens that its completion may have.
        is_gone: It has left; a step that is under way computes it for nobody.
        steps: Dispatched with it.
        sound_steps: Of these, read and found to be numbers.
    """

    slot_index: int
    sampling: RowSampling
    max_tokens: int
    is_gone: bool = False
    steps: int = 0
    sound_steps: int = 0

    @property
    def has_next(self) -> bool:
        """Whether the row may have another token after those chosen so far."""
        return self.sampling.position < self.max_tokens

    @property
    def is_sound(self) -> bool:
        """Whether its caches are known to hold numbers: all they hold went into tokens read."""
        return 0 < self.sound_steps == self.steps


@dataclass(frozen=True, slots=True)
class _Step:
    """A step under way: what it gives each row, and the rows whose sampler failed.

    Attributes:
        parts: Rows with the selection of the sampling call that covers them; one part, unless a
            sampler has failed.
    """

    parts: list[tuple[list[DecoderRow], Selection]]
    failed: list[tuple[DecoderRow, Exception]]

    @property
    def rows(self) -> list[DecoderRow]:
        """All rows of the step."""
        return [row for rows, _ in self.parts for row in rows] + [row for row, _ in self.failed]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Some of a prompt's tokens, and the caches that hold those before them."""

    token_ids: tuple[int, ...]
    caches: Sequence[Cache]


class Decoder:
    """The rows of one lane. Lives on the engine thread."""

    def __init__(
        self, forward: Forward, caches: RowCaches, vocabulary_tokens: int, *, looks_ahead: bool
    ) -> None:
        """Begin without rows.

        Args:
            forward: The model.
            caches: Where the rows' keys, values and states will be.
            vocabulary_tokens: Width of the logits.
            looks_ahead: Whether a step is dispatched before the last one's tokens are read.
        """
        self._forward = forward
        self._caches = caches
        self._vocabulary_tokens = vocabulary_tokens
        self._looks_ahead = looks_ahead
        self._rows: list[DecoderRow] = []
        self._token_ids = mx.zeros((0,), dtype=mx.int32)
        self._sampler: Sampler | None = None
        self._ahead: _Step | None = None

    @property
    def slot_indices(self) -> frozenset[int]:
        """The slots of the rows that the next step computes."""
        return frozenset(row.slot_index for row in self._rows)

    @property
    def kv_bytes(self) -> int:
        """Bytes that the rows' caches hold."""
        return self._caches.nbytes

    def join(self, row: DecoderRow, prefilled: PrefilledRow) -> None:
        """Add a row whose prompt is computed but for its last token."""
        self._caches.join(prefilled)
        token_id = mx.array([prefilled.last_token_id], dtype=mx.int32)
        self._token_ids = mx.concatenate([self._token_ids, token_id])
        self._rows.append(row)
        self._sampler = None

    def leave(self, slot_indices: Collection[int]) -> None:
        """Drop rows; a step that is under way no longer counts for them."""
        under_way = self._ahead.rows if self._ahead is not None else []
        for row in under_way:
            row.is_gone |= row.slot_index in slot_indices
        if all(row.is_gone for row in under_way):
            self._ahead = None  # who joins now need not wait for it
        self._remove([row for row in self._rows if row.slot_index in slot_indices])

    def decode(self, beside: Chunk | None = None) -> tuple[list[SampledToken], list[RowFault]]:
        """The next token of every row.

        Args:
            beside: A prompt's tokens to compute in the same pass; not with looking ahead.

        Returns:
            A token or a fault of each row. With looking ahead, a row that joined while a step was
            under way has neither yet.
        """
        step, self._ahead = self._ahead or self._dispatch(beside), None
        if self._looks_ahead:
            self._remove([row for row in self._rows if not row.has_next])
            self._ahead = self._dispatch() if self._rows else None
        return self._read(step)

    def _dispatch(self, beside: Chunk | None = None) -> _Step:
        self._caches.open_step()
        for row in self._rows:
            row.steps += 1
        token_ids, layers = self._token_ids, self._caches.layers
        if beside is not None:
            layers = mixed_caches(layers, beside.caches, len(beside.token_ids))
            token_ids = mx.concatenate([token_ids, mx.array(beside.token_ids, dtype=mx.int32)])
        logits = self._forward(token_ids[:, None], layers)[: len(self._rows), -1, :]
        step = self._sample(logits)
        mx.async_eval([array for _, selection in step.parts for array in selection.arrays])
        self._remove([row for row, _ in step.failed])
        return step

    def _sample(self, logits: mx.array) -> _Step:
        """All rows in one call; if it fails, each row alone, to find out whose fault it is."""
        states = [row.sampling.state for row in self._rows]
        try:
            if self._sampler is None:
                samplings = [row.sampling for row in self._rows]
                self._sampler = Sampler(samplings, self._vocabulary_tokens)
            selection = self._sampler.sample(logits)
        except Exception:  # noqa: BLE001 - the same comes again below, from the row it belongs to
            self._sampler = None
            for row, state in zip(self._rows, states, strict=True):
                row.sampling.state = state
            return self._sample_alone(logits)
        self._token_ids = selection.token_ids
        return _Step([(list(self._rows), selection)], [])

    def _sample_alone(self, logits: mx.array) -> _Step:
        step = _Step([], [])
        token_ids = []
        for i, row in enumerate(self._rows):
            try:
                sampler = Sampler([row.sampling], self._vocabulary_tokens)
                selection = sampler.sample(logits[i : i + 1])
            except Exception as cause:  # noqa: BLE001 - a row's fault, whatever it is
                step.failed.append((row, cause))
                token_ids.append(mx.zeros((1,), dtype=mx.int32))
            else:
                step.parts.append(([row], selection))
                token_ids.append(selection.token_ids)
        self._token_ids = mx.concatenate(token_ids)
        return step

    def _read(self, step: _Step) -> tuple[list[SampledToken], list[RowFault]]:
        tokens: list[SampledToken] = []
        faults = [RowFault(row.slot_index, cause) for row, cause in step.failed if not row.is_gone]
        for rows, selection in step.parts:
            chosen, poisoned = selection.read(
                [row.slot_index for row in rows], [row.sampling.params for row in rows]
            )
            gone = {row.slot_index for row in rows if row.is_gone}
            tokens += [token for token in chosen if token.slot_index not in gone]
            for row in rows:
                if row.slot_index not in poisoned:
                    row.sound_steps += 1
                elif not row.is_gone:
                    cause = FloatingPointError("the row's logits are not numbers")
                    faults.append(RowFault(row.slot_index, cause))
            self._remove([row for row in rows if row.slot_index in poisoned])
        return tokens, faults

    def _remove(self, rows: Collection[DecoderRow]) -> None:
        """Take rows out; the last ones move into the gaps, all others stay where they are.

        What is not known to be numbers is wiped where it is left behind. Looking ahead, that is so
        of every row: a step is under way when it leaves or moves.
        """
        before = self._rows
        if not any(row in rows for row in before):
            return
        order = _compact([row in rows for row in before])
        self._rows = [before[i] for i in order]
        self._sampler = None
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


def _compact(is_gone: Sequence[bool]) -> list[int]:
    """The old place of each row that stays, such that as few as possible move."""
    stays = [i for i, gone in enumerate(is_gone) if not gone]
    count = len(stays)
    fillers = iter(reversed(stays))
    return [next(fillers) if is_gone[place] else place for place in range(count)]
