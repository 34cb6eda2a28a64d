"""The guesses of an engine's rows: who makes them, how many pay, and what happens if making them fails.

Whatever a proposer raises ends the guessing for one row and nothing else: the row goes on plainly, and
the step's result says why.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from machd.clock import Clock
from machd.engine.protocol.sampling import SamplingParams
from machd.engine.protocol.step import ProposerKind
from machd.engine.speculation.draft_pacing import DraftPacing, RowPacing
from machd.engine.speculation.proposer import Proposer, RowProposer


class RowDrafting:
    """One row's guesses.

    Attributes:
        pacing: How many of them pay.
        has_guessed: Whether there has been a guess: from then on what asking takes is reckoned, too,
            if nothing comes of it.
    """

    def __init__(
        self, pacing: RowPacing, proposer: RowProposer | None, vocabulary_tokens: int
    ) -> None:
        """Begin before the first token; without a proposer nobody guesses."""
        self.pacing = pacing
        self.has_guessed = False
        self._proposer = proposer
        self._vocabulary_tokens = vocabulary_tokens
        self._fault: BaseException | None = None

    @property
    def kv_bytes(self) -> int:
        """Bytes that guessing takes beside the served model's caches."""
        if self._proposer is None:
            return 0
        try:
            return self._proposer.kv_bytes
        except BaseException as cause:  # noqa: BLE001 - whatever it is, the row goes on without
            self.fail(cause)
            return 0

    @property
    def can_propose(self) -> bool:
        """Whether somebody guesses."""
        return self._proposer is not None

    def extend(self, token_ids: Sequence[int]) -> None:
        """Tell what the row has said."""
        if self._proposer is not None:
            try:
                self._proposer.extend(token_ids)
            except BaseException as cause:  # noqa: BLE001 - whatever it is, the row goes on without
                self.fail(cause)

    def propose(self, max_tokens: int) -> tuple[int, ...]:
        """What the row may say next; nothing where that is unknown or asking failed."""
        if self._proposer is None:
            return ()
        try:
            token_ids = self._proposer.propose(max_tokens)[:max_tokens]
            if not all(0 <= one < self._vocabulary_tokens for one in token_ids):
                raise ValueError("it proposes tokens that are not in the vocabulary")  # noqa: TRY301
        except BaseException as cause:  # noqa: BLE001 - whatever it is, the row goes on without
            self.fail(cause)
            return ()
        return token_ids

    def fail(self, cause: BaseException) -> None:
        """Nobody guesses for the row any more."""
        self._fault = cause
        self.close()

    def take_fault(self) -> BaseException | None:
        """Why guessing ended, told once."""
        fault, self._fault = self._fault, None
        return fault

    def close(self) -> None:
        """Hold nothing any more."""
        proposer, self._proposer = self._proposer, None
        if proposer is not None:
            # Whose row has left is not guessed for any more, nor is it after a fault.
            with suppress(BaseException):
                proposer.close()


class Drafting:
    """Guesses for all rows of an engine. Lives on the engine thread."""

    def __init__(
        self,
        proposer: Proposer,
        clock: Clock,
        vocabulary_tokens: int,
        pacing: DraftPacing | None = None,
    ) -> None:
        """Begin without rows.

        Args:
            proposer: Guesses.
            clock: Tells what guessing and passes take.
            vocabulary_tokens: Width of the served model's logits.
            pacing: Says how many guesses pay; by what they and passes take, unless given.
        """
        self._vocabulary_tokens = vocabulary_tokens
        self._proposer = proposer
        self._clock = clock
        self._pacing = pacing or DraftPacing()
        self._since_s = self._guessing_s = 0.0

    def open(self, prompt: Sequence[int], sampling: SamplingParams) -> RowDrafting:
        """Begin with a row."""
        pacing = self._pacing.open()
        try:
            proposer = self._proposer.open(prompt, sampling)
        except BaseException as cause:  # noqa: BLE001 - whatever it is, the row goes on without
            row = RowDrafting(pacing, None, self._vocabulary_tokens)
            row.fail(cause)
            return row
        return RowDrafting(pacing, proposer, self._vocabulary_tokens)

    def guess(
        self, rows: Sequence[RowDrafting], max_tokens: Sequence[int]
    ) -> list[tuple[int, ...]]:
        """What each row may say next.

        Args:
            rows: Of the next pass, in its order.
            max_tokens: For each of them, how many tokens of a guess could be used at the most.
        """
        most = max(max_tokens, default=0)
        if most < 1 or not any(row.can_propose for row in rows):
            return [() for _ in rows]
        wanted = self._pacing.wanted_tokens([row.pacing for row in rows], most)
        limits = map(min, wanted, max_tokens)
        return [self._guess(row, limit) for row, limit in zip(rows, limits, strict=True)]

    def expects_guess(self, rows: Sequence[RowDrafting]) -> bool:
        """Whether a guess may follow a token that is not known yet; a model that guesses always can."""
        if not any(row.can_propose for row in rows):
            return False
        wanted = self._pacing.wanted_tokens([row.pacing for row in rows], 1)
        is_lookup = self._proposer.kind is ProposerKind.NGRAM
        return any(
            tokens and (row.propose(1) if is_lookup else row.can_propose)
            for row, tokens in zip(rows, wanted, strict=True)
        )

    def worthwhile_tokens(
        self, rows: Sequence[RowDrafting], guessed_tokens: Sequence[int]
    ) -> list[int]:
        """How many of each row's guesses to put into the pass."""
        if not any(guessed_tokens):
            return [0 for _ in rows]
        return self._pacing.worthwhile_tokens([row.pacing for row in rows], guessed_tokens)

    @property
    def batched_gain(self) -> float | None:
        """What guesses would be worth for several rows; see :class:`DraftPacing`."""
        return self._pacing.batched_gain

    def begin_pass(self) -> None:
        """From now on time counts for the next :meth:`observe_pass`, but for that of guessing."""
        self._since_s, self._guessing_s = self._clock.monotonic_s(), 0.0

    def observe_verdict(self, row: RowDrafting, drafted_tokens: int, accepted_tokens: int) -> None:
        """Take in how many of a row's guesses were right."""
        self._pacing.observe_verdict(row.pacing, drafted_tokens, accepted_tokens)

    def observe_pass(self, rows: Sequence[RowDrafting], tokens: int) -> None:
        """Take in what a pass took, of so many tokens of its longest row."""
        duration_s = self._clock.monotonic_s() - self._since_s - self._guessing_s
        self._pacing.observe_pass([row.pacing for row in rows], tokens, duration_s)

    def close(self) -> None:
        """Give back what all rows share."""
        self._proposer.close()

    def _guess(self, row: RowDrafting, max_tokens: int) -> tuple[int, ...]:
        if max_tokens < 1 or not row.can_propose:
            return ()
        since_s = self._clock.monotonic_s()
        token_ids = row.propose(max_tokens)
        duration_s = self._clock.monotonic_s() - since_s
        self._guessing_s += duration_s
        row.has_guessed |= bool(token_ids)
        if row.has_guessed:
            self._pacing.observe_guessing(row.pacing, len(token_ids), duration_s)
        return token_ids
