"""Verification of tokens ahead: accepted as long as the row would have chosen them anyway.

Each position of a span is sampled as plain decoding would sample it: from the same logits, with the
same history, grammar and random draw, which (seed, position) alone decides. The first token that differs
from the draft is the row's own; the drafts behind it followed a token that the row did not choose.

For a draft of one named token this is the standard rule of speculative sampling (Leviathan et al. 2022,
arXiv:2211.17192, section 2.3; Chen et al. 2023, arXiv:2302.01318): accept with the probability that the
model gives the token, else draw from the others. One draw decides both here, so that a seeded answer is
the same with drafts and without.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from machd.engine.protocol.step import SampledToken
from machd.engine.step.sampling import RowSampling
from machd.errors import GrammarError


@dataclass(frozen=True, slots=True)
class Draft:
    """A row's tokens ahead, possibly none.

    Attributes:
        samplings: The row's sampling state at each position of its span: before each of the tokens
            and after the last one. Forks, if there are tokens ahead.
        forced_tokens: How many of the first tokens the row's grammar dictates.
    """

    token_ids: tuple[int, ...]
    samplings: tuple[RowSampling, ...]
    forced_tokens: int = 0

    def first(self, tokens: int) -> Draft:
        """Return the beginning of the draft."""
        forced = min(self.forced_tokens, tokens)
        return Draft(self.token_ids[:tokens], self.samplings[: tokens + 1], forced)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of verifying a row's span.

    Attributes:
        tokens: The accepted tokens ahead and one token more. That one is None if its logits are
            not finite.
        sampling: The row's state behind them; its matcher has not accepted the last one yet.
        is_finite: True if the logits behind rejected drafts are finite, too.
    """

    tokens: tuple[SampledToken | None, ...]
    sampling: RowSampling
    is_finite: bool

    @property
    def accepted_tokens(self) -> int:
        """Tokens ahead that were accepted."""
        return len(self.tokens) - 1


def draft_of(sampling: RowSampling, proposed: Sequence[int], max_tokens: int) -> Draft:
    """Return the part of a proposal that the row's grammar allows.

    Where the grammar dictates a token, that one is taken, whatever was proposed.

    Args:
        sampling: The row's state; not changed.
        proposed: Token ids that may follow.
        max_tokens: Upper limit for the draft.
    """
    token_ids: list[int] = []
    samplings = [sampling.fork()]
    forced_tokens = 0
    is_followed = True
    while len(token_ids) < max_tokens:
        place, matcher = len(token_ids), samplings[-1].matcher
        is_followed = is_followed and place < len(proposed)
        if matcher is not None and matcher.forced:
            token_id = matcher.forced[0]
            is_followed = is_followed and token_id == proposed[place]
            forced_tokens += forced_tokens == place
        elif is_followed:
            token_id = proposed[place]
        else:
            break
        try:
            following = samplings[-1].after(token_id)
        except GrammarError:
            break  # verification raises it again, for the row itself
        if following is None:
            break
        token_ids.append(token_id)
        samplings.append(following)
    return Draft(tuple(token_ids), tuple(samplings), min(forced_tokens, len(token_ids)))


def verify(draft: Draft, chosen: Sequence[SampledToken | None]) -> Verdict:
    """Compare a draft with the tokens that were sampled at each position of its span.

    Args:
        draft: The row's tokens ahead.
        chosen: One token for each position; None where the logits are not finite.
    """
    accepted = 0
    for drafted, token in zip(draft.token_ids, chosen, strict=False):
        if token is None or token.token_id != drafted:
            break
        accepted += 1
    return Verdict(
        tuple(chosen[: accepted + 1]),
        draft.samplings[accepted],
        is_finite=all(chosen[accepted + 1 :]),
    )
