"""A running row, and what a step of its lane makes."""

from __future__ import annotations

from dataclasses import dataclass, field

from machd.engine.protocol.step import DraftFault, DraftOutcome, RowFault, SampledToken
from machd.engine.speculation.drafting import RowDrafting
from machd.engine.step.sampling import RowSampling


@dataclass(slots=True, eq=False)
class DecoderRow:
    """A running row.

    Attributes:
        sampling: Parameters and history; its position counts the tokens chosen so far.
        max_tokens: Tokens that its completion may have.
        is_gone: It has left; a step that is under way computes it for nobody.
        steps: Dispatched with it.
        sound_steps: Of these, read and found to be numbers.
        forced: Tokens that follow the last one without being sampled: part of the next pass.
        length: Positions in the caches, those of a pass under way included.
        drafting: Its guesses; None where nobody guesses for any row.
    """

    slot_index: int
    sampling: RowSampling
    max_tokens: int
    is_gone: bool = False
    steps: int = 0
    sound_steps: int = 0
    forced: tuple[int, ...] = ()
    length: int = 0
    drafting: RowDrafting | None = None

    @property
    def tokens_left(self) -> int:
        """Tokens that it may have after those chosen so far."""
        return self.max_tokens - self.sampling.position

    @property
    def is_sound(self) -> bool:
        """Whether its caches are known to hold numbers: all they hold went into tokens read."""
        return 0 < self.sound_steps == self.steps


@dataclass(slots=True)
class Decoded:
    """What one step of a lane made; see :class:`machd.engine.protocol.step.StepResult`."""

    tokens: list[SampledToken] = field(default_factory=list)
    faults: list[RowFault] = field(default_factory=list)
    drafts: list[DraftOutcome] = field(default_factory=list)
    draft_faults: list[DraftFault] = field(default_factory=list)

    def add(self, other: Decoded) -> None:
        """Put another lane's beside it."""
        self.tokens += other.tokens
        self.faults += other.faults
        self.drafts += other.drafts
        self.draft_faults += other.draft_faults
