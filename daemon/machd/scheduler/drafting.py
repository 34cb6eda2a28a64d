"""When tokens are guessed ahead: for a decode that runs alone, and beside others where that is right."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["NO_DRAFTS", "DraftPolicy"]


@dataclass(frozen=True, slots=True)
class DraftPolicy:
    """How many tokens may be guessed for each row of a step.

    A lonely request gets all that the machine has. When others come, a pass that computes all rows
    makes more tokens than guessing for one of them, so from the next step on nobody guesses, unless
    the model is known to take ragged guesses out of a batch; then the engine does as long as it
    measures that this makes more still.

    Attributes:
        max_draft_tokens: For a decode that runs alone; 0 for never.
        is_batched: Whether rows that run together may have as many.
    """

    max_draft_tokens: int = 0
    is_batched: bool = False

    def tokens_for(self, running: int) -> int:
        """For each row, while so many decodes have slots."""
        return self.max_draft_tokens if running == 1 or self.is_batched else 0

    def is_speculative(self, running: int) -> bool:
        """Whether a step of so many decodes is one that guesses for a lonely one."""
        return running <= 1 and self.max_draft_tokens > 0


NO_DRAFTS = DraftPolicy()
