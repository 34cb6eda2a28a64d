"""Guesses against what a row says: accepted as long as they are what would have been said anyway.

Each position of a guess is sampled as plain decoding would sample it: from the same logits, with the
same history, grammar and random draw, which (seed, position) alone decides. The first token that is
another one than was guessed is the row's own; the guesses after it followed a token that was not said.

Of a guess that names one token this is the standard rule of speculative sampling (Leviathan et al. 2022,
arXiv:2211.17192, section 2.3; Chen et al. 2023, arXiv:2302.01318): accept with the probability that the
model gives the token, else draw from the others. One draw decides both here, so that a seeded answer is
the same with guesses and without.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import mlx.core as mx

from machd.engine.grammar.masks import TokenMasks
from machd.engine.protocol.step import SampledToken
from machd.engine.step.sampling import RowSampling, Sampler
from machd.errors import GrammarError


@dataclass(frozen=True, slots=True)
class Draft:
    """A row's guess, possibly of no tokens.

    Attributes:
        samplings: How the row samples before each of the tokens and after the last: one more than
            there are tokens, of which nothing is the row's own.
    """

    token_ids: tuple[int, ...]
    samplings: tuple[RowSampling, ...]

    def first(self, tokens: int) -> Draft:
        """Its beginning."""
        return Draft(self.token_ids[:tokens], self.samplings[: tokens + 1])


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of a row's guess.

    Attributes:
        tokens: What the row says: the guesses that were right, and one token that was not guessed.
            The last one is None where its logits are not numbers.
        sampling: The row's state after them, but for a matcher that has not seen the last one.
        is_clean: Whether the logits after the guesses that were wrong are numbers, too.
    """

    tokens: tuple[SampledToken | None, ...]
    sampling: RowSampling
    is_clean: bool

    @property
    def accepted_tokens(self) -> int:
        """Guesses that were right."""
        return len(self.tokens) - 1


def draft_of(sampling: RowSampling, proposed: Sequence[int], max_tokens: int) -> Draft:
    """The part of a proposal that could come true.

    It ends before a token that the row's grammar rules out. Where the grammar leaves no choice, its
    token is taken, whatever was proposed.

    Args:
        sampling: The row's, which stays as it is.
        proposed: Token ids that may follow.
        max_tokens: The most that the draft may have.
    """
    token_ids: list[int] = []
    samplings = [sampling.fork()]
    is_followed = True
    while len(token_ids) < max_tokens:
        place, matcher = len(token_ids), samplings[-1].matcher
        is_followed = is_followed and place < len(proposed)
        if matcher is not None and matcher.forced:
            token_id = matcher.forced[0]
            is_followed = is_followed and token_id == proposed[place]
        elif is_followed:
            token_id = proposed[place]
        else:
            break
        try:
            following = samplings[-1].after(token_id)
        except GrammarError:
            break  # who verifies will find out
        if following is None:
            break
        token_ids.append(token_id)
        samplings.append(following)
    return Draft(tuple(token_ids), tuple(samplings))


def verify(
    drafts: Sequence[Draft],
    slot_indices: Sequence[int],
    logits: mx.array,
    vocabulary_tokens: int,
    masks: TokenMasks | None,
) -> list[Verdict]:
    """Sample every position of every draft at once, and see how far each came true.

    Args:
        drafts: One for each row of a pass; their samplings are used up.
        slot_indices: Of the rows.
        logits: [positions, vocabulary]: for each row, after its last token and after each guess.
        vocabulary_tokens: Width of the logits.
        masks: Makes the masks of constrained rows.

    Returns:
        One verdict for each row.

    Raises:
        Exception: Whatever a sampler raises; the rows' own states are untouched.
    """
    samplings = [one for draft in drafts for one in draft.samplings]
    selection = Sampler(samplings, vocabulary_tokens, masks).sample(logits)
    mx.eval(selection.arrays)
    sound, _ = selection.read(range(len(samplings)), [one.params for one in samplings])
    by_place = {token.slot_index: token for token in sound}
    verdicts = []
    begin = 0
    for draft, slot_index in zip(drafts, slot_indices, strict=True):
        end = begin + len(draft.samplings)
        chosen = [by_place.get(place) for place in range(begin, end)]
        verdicts.append(_verdict(draft, slot_index, chosen))
        begin = end
    return verdicts


def _verdict(draft: Draft, slot_index: int, chosen: Sequence[SampledToken | None]) -> Verdict:
    accepted = 0
    for guess, token in zip(draft.token_ids, chosen, strict=False):
        if token is None or token.token_id != guess:
            break
        accepted += 1
    said = tuple(
        None if token is None else replace(token, slot_index=slot_index)
        for token in chosen[: accepted + 1]
    )
    return Verdict(said, draft.samplings[accepted], is_clean=all(chosen[accepted + 1 :]))
