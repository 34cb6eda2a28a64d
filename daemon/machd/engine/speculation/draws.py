"""Port for drawing draft tokens: with the served row's parameters and draws, from a draft model's logits.

A row's token at a position is a function of its logits, its parameters and a draw that its seed and the
position decide. A draft token chosen with the same parameters and draw is right as often as the two models'
distributions agree, whether the row is greedy or not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

import mlx.core as mx

from machd.request.generation import SamplingParams


class Drawn(Protocol):
    """One draft token, lazy until evaluated."""

    @property
    def token_ids(self) -> mx.array:
        """The token, int32 [1]."""
        ...

    @property
    def usable(self) -> mx.array:
        """False where the logits are not finite, bool [1]."""
        ...

    @property
    def arrays(self) -> list[mx.array]:
        """Arrays to evaluate before the token is read."""
        ...


class DraftDraws(Protocol):
    """One row's draws, from the tokens that it has generated on."""

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append tokens that the row has generated; drafts behind them are rolled back."""
        ...

    def choose(self, logits: mx.array) -> Drawn:
        """Draw the next draft token from logits [1, vocabulary of the draft model]."""
        ...

    def roll_back(self) -> None:
        """Drop all drafts behind the last generated token."""
        ...


OpenDraws: TypeAlias = Callable[[Sequence[int], SamplingParams], DraftDraws]
"""Begins with a row: its prompt and its parameters."""


def drawn_tokens(chosen: Sequence[Drawn]) -> list[int]:
    """Wait for one row's draft tokens.

    Raises:
        FloatingPointError: The logits are not finite.
    """
    mx.eval([array for one in chosen for array in one.arrays])
    if not all(bool(one.usable[0]) for one in chosen):
        raise FloatingPointError("the draft model's logits are not finite numbers")
    return [int(one.token_ids[0]) for one in chosen]
