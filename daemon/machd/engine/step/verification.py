"""A row's span, and its verification: tokens ahead are accepted while the row would have chosen them.

Each position of a span is sampled as plain decoding would sample it: from the same logits, with the
same history, grammar and noise, which (seed, position) alone decides. The first token that differs
from the span is the row's own; the tokens after it followed one that the row did not choose. Forced
tokens need no rule of their own: the sampler chooses a forced token, so it always equals the span's.

For a draft of one named token this is the standard rule of speculative sampling (Leviathan et al. 2022,
arXiv:2211.17192, section 2.3; Chen et al. 2023, arXiv:2302.01318): accept with the probability that the
model gives the token, else draw from the others. One draw decides both here, so that a seeded answer is
the same with drafts and without.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from machd.engine.protocol.step import SampledToken
from machd.engine.sampling.sampling_state import SamplingState
from machd.errors import GrammarError


@dataclass(slots=True)
class Span:
    """The tokens of one row in a pass: its last token, and those ahead of it, possibly none.

    Attributes:
        ahead_ids: Token ids that follow the row's last token, forced or drafted.
        ahead_states: The row's sampling state behind each of them; none where nothing is sampled.
        forced_tokens: How many of the first tokens ahead the row's grammar dictates. One that it
            dictates after a draft token depends on that and counts as drafted.
    """

    ahead_ids: tuple[int, ...] = ()
    ahead_states: tuple[SamplingState, ...] = ()
    forced_tokens: int = 0

    @property
    def length(self) -> int:
        """Tokens of the span."""
        return 1 + len(self.ahead_ids)

    @property
    def draft_tokens(self) -> int:
        """Tokens ahead that are not certain to be right."""
        return len(self.ahead_ids) - self.forced_tokens

    def first(self, tokens: int) -> Span:
        """Return the span with at most ``tokens`` tokens ahead."""
        forced = min(self.forced_tokens, tokens)
        return Span(self.ahead_ids[:tokens], self.ahead_states[:tokens], forced)


@dataclass(slots=True)
class Verdict:
    """Result of verifying a row's span.

    Attributes:
        tokens: The accepted tokens ahead and one token more, which is None if its logits are NaN.
        is_finite: True if no logits after rejected tokens are NaN either.
    """

    tokens: tuple[SampledToken | None, ...]
    is_finite: bool

    @property
    def accepted_tokens(self) -> int:
        """Tokens ahead that were accepted."""
        return len(self.tokens) - 1


def span_of(state: SamplingState, proposed: Sequence[int], max_ahead_tokens: int) -> Span:
    """Return a span of the proposed tokens that the row's grammar allows.

    Where the grammar dictates a token, that one is taken, whatever was proposed; the rest of the proposal
    is dropped if it said otherwise.

    Args:
        state: The row's sampling state; not changed.
        proposed: Token ids that may follow.
        max_ahead_tokens: Upper limit for the tokens ahead.
    """
    ahead_ids: list[int] = []
    ahead_states: list[SamplingState] = []
    forced_tokens = 0
    while (place := len(ahead_ids)) < max_ahead_tokens:
        matcher = state.matcher
        forced = () if matcher is None else matcher.forced
        if not forced and place >= len(proposed):
            break
        token_id = forced[0] if forced else proposed[place]
        if matcher is not None and not matcher.allows(token_id):
            break
        try:
            state = state.fork().after([token_id])
        except GrammarError:
            break  # if the row samples this token, settling gets the same error, as the row's fault
        if forced and forced_tokens == place:
            forced_tokens += 1
        if tuple(proposed[place : place + 1]) != (token_id,):
            proposed = ()
        ahead_ids.append(token_id)
        ahead_states.append(state)
    return Span(tuple(ahead_ids), tuple(ahead_states), forced_tokens)


def verify(span: Span, chosen: Sequence[SampledToken | None]) -> Verdict:
    """Compare a span with the tokens that were sampled at each of its positions.

    Args:
        span: The row's last token and those ahead.
        chosen: One token for each position; None where the logits are NaN.
    """
    accepted = 0
    for expected, token in zip(span.ahead_ids, chosen, strict=False):
        if token is None or token.token_id != expected:
            break
        accepted += 1
    return Verdict(tuple(chosen[: accepted + 1]), is_finite=None not in chosen[accepted + 1 :])
