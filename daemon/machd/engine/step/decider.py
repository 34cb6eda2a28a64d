"""What a step decides, asked of a decider: alone this process decides, and of several ranks rank 0 does.

Between two decisions all ranks compute the same passes over the same tokens. Rank 0 alone has grammars,
proposers and samplers: two ranks whose logits differ in the last bit would not choose the same token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from machd.engine.step.decode_pass import DecodePass
from machd.engine.step.decoder_row import Decoded
from machd.engine.step.verification import Span


class Decider(Protocol):
    """Decisions of a step, in the order in which it asks for them.

    Every method is a collective: all ranks call it at the same place of a step. What would decide is
    called where decisions are made, and nowhere else.
    """

    def tightest(
        self, measure: Callable[[], tuple[int, int]], *, only_decodes: bool
    ) -> tuple[int, int] | None:
        """Return a step's need, and what is left for it, of the rank that has least to spare.

        Args:
            measure: Returns both for this process.
            only_decodes: The step computes no prompt.

        Returns:
            Bytes; None if no rank looks before this step.
        """
        ...

    def seated(self, slot_indices: Sequence[int]) -> Sequence[int]:
        """Return which rows join their lanes, of those that can begin to decode here."""
        ...

    def spans(self, choose: Callable[[], list[Span]], rows: int) -> list[Span]:
        """Return the span of each of so many rows in the next pass; empty for plain ones."""
        ...

    def settled(
        self, current: DecodePass, settle: Callable[[DecodePass], Decoded | None]
    ) -> Decoded | None:
        """Return the result of a pass; None if it is to be computed again without tokens ahead."""
        ...


class Alone:
    """The decider of a process that computes the model alone."""

    def tightest(
        self, measure: Callable[[], tuple[int, int]], *, only_decodes: bool
    ) -> tuple[int, int]:
        """Return this process's need, and what is left for it."""
        del only_decodes
        return measure()

    def seated(self, slot_indices: Sequence[int]) -> Sequence[int]:
        """Return all that can begin."""
        return slot_indices

    def spans(self, choose: Callable[[], list[Span]], rows: int) -> list[Span]:
        """Choose."""
        del rows
        return choose()

    def settled(
        self, current: DecodePass, settle: Callable[[DecodePass], Decoded | None]
    ) -> Decoded | None:
        """Settle."""
        return settle(current)
