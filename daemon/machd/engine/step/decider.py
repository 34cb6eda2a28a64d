"""What a step decides, asked of a decider: alone this process decides, and of several ranks rank 0 does.

Between two decisions all ranks compute the same passes over the same tokens. Rank 0 alone has grammars,
proposers and samplers: two ranks whose logits differ in the last bit would not choose the same token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from machd.engine.step.decode_pass import DecodePass
from machd.engine.step.row import Decoded
from machd.engine.step.verification import Span


class Decider:
    """The decider of a process that computes alone; :mod:`machd.engine.ranks.deciding` has those of ranks.

    For ranks every method is a collective: all call it at the same place of a step.
    """

    def tightest(
        self, measure: Callable[[], tuple[int, int]], *, only_decodes: bool
    ) -> tuple[int, int] | None:
        """Return the bytes that a step needs, and those left for it, on the rank that has least to spare.

        ``measure`` returns both for this process. None if no rank looks before this step.
        """
        del only_decodes
        return measure()

    def seated(self, slot_indices: Sequence[int]) -> Sequence[int]:
        """Return which rows join their lanes, of those that can begin to decode here."""
        return slot_indices

    def spans(self, choose: Callable[[], list[Span]], rows: int) -> list[Span]:
        """Return the span of each of so many rows in the next pass; empty for plain ones."""
        del rows
        return choose()

    def settled(
        self, current: DecodePass, settle: Callable[[DecodePass], Decoded | None]
    ) -> Decoded | None:
        """Return the result of a pass; None if it is to be computed again without tokens ahead."""
        return settle(current)
