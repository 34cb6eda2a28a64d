"""A running row, and the result of one step of its lane."""

from __future__ import annotations

from dataclasses import dataclass, field

from machd.engine.protocol.step import (
    DraftFault,
    DraftOutcome,
    RowFault,
    SampledToken,
)
from machd.engine.sampling.sampling_state import SamplingState
from machd.engine.step.proposals import RowProposals
from machd.engine.step.verification import Span


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
