"""One row's sampling state: its parameters, its history and its grammar's state.

The room grammar/ satisfies :class:`Matcher` by structure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, Self

import mlx.core as mx

from machd.request.generation import SamplingParams


class Matcher(Protocol):
    """A grammar's state for one row, after the tokens that it has accepted."""

    @property
    def forced(self) -> Sequence[int]:
        """Tokens that the grammar dictates next, in order."""
        ...

    @property
    def is_done(self) -> bool:
        """True once every token is allowed for good."""
        ...

    @property
    def needs_mask(self) -> bool:
        """True if some tokens are not allowed next and none is forced."""
        ...

    def allows(self, token_id: int) -> bool:
        """Return True if the token may come next."""
        ...

    def accept(self, token_id: int) -> None:
        """Advance past a token that was sampled.

        Raises:
            GrammarError: The token is not allowed, or the grammar became too complex.
        """
        ...

    def take_forced(self, max_tokens: int) -> list[int]:
        """Advance past the next forced tokens, ``max_tokens`` at most, and return them."""
        ...

    def fork(self) -> Self:
        """Return a copy that moves on by itself."""
        ...


@dataclass(slots=True)
class RowSampling:
    """One row's sampling state, which follows the row wherever it goes.

    A sampler moves its position and counts on over the token that it chooses, and settling moves its matcher. Tokens
    ahead are sampled on forks (:meth:`after`), of which the row takes the one behind its last right token (:meth:`take`).

    Attributes:
        position: Index of the next token in the completion.
        prompt_mask: Which tokens the prompt has, bool [vocabulary]; None unless it matters.
        counts: How often each token was generated, float32 [vocabulary]; None unless it matters.
        matcher: State of the row's grammar; None where every token is allowed.
    """

    params: SamplingParams
    position: int = 0
    prompt_mask: mx.array | None = None
    counts: mx.array | None = None
    matcher: Matcher | None = None

    @classmethod
    def for_prompt(
        cls,
        params: SamplingParams,
        prompt: Sequence[int],
        vocabulary_tokens: int,
        matcher: Matcher | None = None,
    ) -> RowSampling:
        """Return the state in which a row with this prompt starts."""
        has_penalty = params.presence_penalty or params.frequency_penalty
        if params.repetition_penalty == 1.0 and not has_penalty:
            return cls(params, matcher=matcher)
        mask = mx.zeros((vocabulary_tokens,), dtype=mx.bool_)
        mask[mx.array(list(prompt), dtype=mx.int32)] = True
        return cls(params, 0, mask, mx.zeros((vocabulary_tokens,), dtype=mx.float32), matcher)

    def resume(self, token_ids: Sequence[int]) -> None:
        """Move on over the tokens that the row had when it was suspended.

        Raises:
            GrammarError: The grammar became too complex.
        """
        self.add(token_ids)
        for token_id in token_ids:
            if self.matcher is None:
                return
            if not self.matcher.take_forced(1):
                self.matcher.accept(token_id)
            if self.matcher.is_done:
                self.matcher = None

    def fork(self) -> RowSampling:
        """Return a copy that moves on by itself."""
        return replace(self, matcher=None if self.matcher is None else self.matcher.fork())

    def take(self, other: RowSampling) -> None:
        """Move on to the state of a fork."""
        self.position, self.counts, self.matcher = other.position, other.counts, other.matcher

    def after(self, token_id: int) -> RowSampling | None:
        """Return a fork after a token; None if the grammar does not allow it.

        Raises:
            GrammarError: The grammar became too complex.
        """
        if self.matcher is not None and not self.matcher.allows(token_id):
            return None
        following = self.fork()
        if following.matcher is not None and not following.matcher.take_forced(1):
            following.matcher.accept(token_id)
        following.add((token_id,))
        return following

    def add(self, token_ids: Sequence[int]) -> None:
        """Count tokens that were not chosen by a sampler."""
        self.position += len(token_ids)
        if self.counts is not None and token_ids:
            ids = mx.array(list(token_ids), dtype=mx.int32)
            self.counts = self.counts.at[ids].add(1.0)
