"""A running row, its draft tokens, and the result of one step of its lane.

An exception of a proposer, or of a grammar on a drafted path, ends the drafts of its row and nothing else:
the row decodes on without them, and the step's result carries the cause.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from machd.engine.protocol.step import (
    DraftFault,
    DraftOutcome,
    ProposerKind,
    RowFault,
    SampledToken,
)
from machd.engine.sampling.sampling_state import SamplingState
from machd.engine.step.ports import Proposer, RowProposer
from machd.engine.step.verification import Span
from machd.request.generation import SamplingParams


class RowProposals:
    """Draft tokens of one row: none without a proposer, and none after it has failed.

    Attributes:
        is_lookup: A proposal costs next to nothing, so that more may be asked for than is used.
    """

    def __init__(self) -> None:
        """Begin without a proposer."""
        self.is_lookup = False
        self._vocabulary_tokens = 0
        self._fault: BaseException | None = None
        self._row: RowProposer | None = None

    def begin(
        self,
        proposer: Proposer,
        prompt: Sequence[int],
        sampling: SamplingParams,
        vocabulary_tokens: int,
    ) -> None:
        """Open the row at ``proposer``."""
        self.is_lookup = proposer.kind is ProposerKind.NGRAM
        self._vocabulary_tokens = vocabulary_tokens
        try:
            self._row = proposer.open(prompt, sampling)
        except BaseException as cause:  # noqa: BLE001 - reported as the row's DraftFault
            self.fail(cause)

    @property
    def is_active(self) -> bool:
        """True until the proposer has failed or was closed."""
        return self._row is not None

    @property
    def kv_bytes(self) -> int:
        """Bytes that the proposer holds for the row beside the served model's caches."""
        if self._row is None:
            return 0
        try:
            return self._row.kv_bytes
        except BaseException as cause:  # noqa: BLE001 - reported as the row's DraftFault
            self.fail(cause)
            return 0

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append tokens that the row has generated."""
        if self._row is not None:
            try:
                self._row.extend(token_ids)
            except BaseException as cause:  # noqa: BLE001 - reported as the row's DraftFault
                self.fail(cause)

    def propose(self, max_tokens: int) -> tuple[int, ...]:
        """Propose the row's next tokens; empty where none are known."""
        if self._row is None or max_tokens < 1:
            return ()
        try:
            token_ids = self._row.propose(max_tokens)[:max_tokens]
            if not all(0 <= one < self._vocabulary_tokens for one in token_ids):
                raise ValueError("it proposes tokens that are not in the vocabulary")  # noqa: TRY301
        except BaseException as cause:  # noqa: BLE001 - reported as the row's DraftFault
            self.fail(cause)
            return ()
        return token_ids

    def fail(self, cause: BaseException) -> None:
        """End the row's drafts because of ``cause``, if it has any."""
        self._fault = cause
        self.close()

    def take_fault(self) -> BaseException | None:
        """Return the fault that ended the drafts, once."""
        fault, self._fault = self._fault, None
        return fault

    def close(self) -> None:
        """Give back what the proposer holds for the row."""
        row, self._row = self._row, None
        if row is not None:
            # The row has left or its drafts have failed: a second failure changes nothing.
            with suppress(BaseException):
                row.close()


@dataclass(slots=True, eq=False)
class DecoderRow:
    """A running row.

    Attributes:
        sampling: State behind its last token that was read.
        max_tokens: Tokens that its completion may have.
        proposals: The row's draft tokens.
        last_token_id: Last token read: input of the next pass or, with look-ahead, of the pass under way.
        length: Positions in the caches, those of a pass under way included.
        position_shift: What its images add to the positions of tokens behind them.
        is_gone: Left the lane; a pass under way drops its tokens.
    """

    slot_index: int
    sampling: SamplingState
    max_tokens: int
    proposals: RowProposals = field(default_factory=RowProposals)
    last_token_id: int = 0
    length: int = 0
    position_shift: int = 0
    is_gone: bool = False

    @property
    def tokens_left(self) -> int:
        """Tokens that the completion may still get, behind the last one that was read."""
        return self.max_tokens - self.sampling.position

    @property
    def forced_tokens(self) -> int:
        """Tokens that the row's grammar dictates next."""
        return 0 if self.sampling.matcher is None else len(self.sampling.matcher.forced)

    def states(self, span: Span) -> tuple[SamplingState, ...]:
        """Return the state that each position of a span is sampled in."""
        return (self.sampling, *span.ahead_states)


@dataclass(frozen=True, slots=True)
class SettledRow:
    """Part of a pass that a row keeps.

    Attributes:
        kept_tokens: Tokens of its span whose keys and values stay.
        last_token_id: Input of its next pass; None if its logits cannot be used.
        is_finite: No key or value behind the kept ones is NaN.
        has_failed: It leaves the lane.
    """

    kept_tokens: int
    last_token_id: int | None
    is_finite: bool
    has_failed: bool


@dataclass(slots=True)
class Decoded:
    """Result of one step of a lane; see :class:`machd.engine.protocol.step.StepResult`.

    Attributes:
        settled: What each row of the pass keeps of it.
    """

    tokens: list[SampledToken] = field(default_factory=list)
    faults: list[RowFault] = field(default_factory=list)
    drafts: list[DraftOutcome] = field(default_factory=list)
    draft_faults: list[DraftFault] = field(default_factory=list)
    span_tokens: int = 0
    settled: list[SettledRow] = field(default_factory=list)

    def add(self, other: Decoded) -> None:
        """Append the result of another lane."""
        self.tokens += other.tokens
        self.faults += other.faults
        self.drafts += other.drafts
        self.draft_faults += other.draft_faults
        self.span_tokens = max(self.span_tokens, other.span_tokens)
