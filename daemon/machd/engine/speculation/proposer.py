"""Who guesses what a row says next: one protocol, whatever the guesses come from.

A guess costs time and never an answer: what is guessed wrongly is not said. So a proposer may be
wrong as often as it likes, and whatever it raises only ends the guessing for that row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from machd.engine.protocol.sampling import SamplingParams
from machd.engine.protocol.step import ProposerKind


class RowProposer(Protocol):
    """Guesses for one row. Used on the engine thread."""

    @property
    def kv_bytes(self) -> int:
        """Bytes that it holds for the row beside the served model's caches."""
        ...

    def extend(self, token_ids: Sequence[int]) -> None:
        """The row has said these, after all that it was told before. Cheap: it is every token."""
        ...

    def propose(self, max_tokens: int) -> tuple[int, ...]:
        """What the row may say next: the likeliest tokens in order; fewer, or none, where unknown.

        Asking twice gives the same: a proposal need not be used. Who has a lot to read first, such as
        the prompt, reads a piece of it and guesses nothing. What that takes before the first guess is
        not reckoned among the costs of guesses: it is done once.

        Args:
            max_tokens: One at least.
        """
        ...

    def close(self) -> None:
        """The row has left: hold nothing for it any more."""
        ...


class Proposer(Protocol):
    """Guesses for the rows of an engine. Made, used and closed on the engine thread."""

    @property
    def kind(self) -> ProposerKind:
        """Which one it is."""
        ...

    def open(self, prompt: Sequence[int], sampling: SamplingParams) -> RowProposer:
        """Begin with a row that has said nothing yet.

        Args:
            prompt: Its tokens; copied if they are needed.
            sampling: How the row's tokens are chosen: with the same draws, a model that guesses
                agrees with the served one as often as their distributions do.
        """
        ...

    def close(self) -> None:
        """Give back what all rows share, such as a second model's weights."""
        ...
