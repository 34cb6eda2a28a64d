"""A row's sampling state: its parameters, its history and its grammar's state.

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


@dataclass(frozen=True, slots=True)
class SamplingState:
    """What the choice of a row's next token depends on besides its logits.

    :meth:`after` gives the state behind further tokens. It takes the matcher along, so this state is used up; where both
    are needed, as for tokens ahead that may be wrong, :meth:`fork` first.

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
    ) -> SamplingState:
        """Return the state in which a row with this prompt starts."""
        if not has_penalty(params):
            return cls(params, matcher=matcher)
        mask = mx.zeros((vocabulary_tokens,), dtype=mx.bool_)
        mask[mx.array(list(prompt), dtype=mx.int32)] = True
        return cls(params, 0, mask, mx.zeros((vocabulary_tokens,), dtype=mx.float32), matcher)

    def fork(self) -> SamplingState:
        """Return the same state with a matcher of its own."""
        return self if self.matcher is None else replace(self, matcher=self.matcher.fork())

    def after(self, token_ids: Sequence[int] | mx.array) -> SamplingState:
        """Return the state behind these tokens, and use this one up.

        Args:
            token_ids: An array, int32 [tokens], if they are not read yet; only of a row without a grammar.

        Raises:
            GrammarError: A token is not allowed, or the grammar became too complex.
        """
        matcher, counts = self.matcher, self.counts
        if matcher is not None:
            assert not isinstance(token_ids, mx.array), "a matcher reads tokens"
            matcher = _moved_on(matcher, token_ids)
        if counts is not None and len(token_ids):
            if not isinstance(token_ids, mx.array):
                token_ids = mx.array(list(token_ids), dtype=mx.int32)
            counts = counts.at[token_ids].add(1.0)
        position = self.position + len(token_ids)
        return SamplingState(self.params, position, self.prompt_mask, counts, matcher)


def has_penalty(params: SamplingParams) -> bool:
    """Return True if a row's choice depends on the tokens that were there already."""
    return bool(
        params.repetition_penalty != 1.0 or params.presence_penalty or params.frequency_penalty
    )


def _moved_on(matcher: Matcher, token_ids: Sequence[int]) -> Matcher | None:
    """Advance past tokens, forced or sampled; None once every token is allowed for good."""
    for token_id in token_ids:
        if not matcher.take_forced(1):  # a forced token is the one that comes
            matcher.accept(token_id)
        if matcher.is_done:
            return None
    return matcher
