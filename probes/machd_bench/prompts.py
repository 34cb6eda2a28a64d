"""Prompts of a given length that share no beginning."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeAlias

Prompt: TypeAlias = Sequence[int | str]
"""All token ids, whose number is exact, or all words, which are about as many tokens."""

# Common enough that tokenizers for English take one token for each, the space before it included.
_COMMON = (
    "the of and to in is you that it he was for on are as with his they at be this have from or one"
    " had by word but not what all were we when your can said there use an each which she do how"
    " their if will up other about out many then them these so some her would make like him into"
    " time has look two more write go see number no way could people my than first water been call"
)
WORDS = tuple(dict.fromkeys((_COMMON + " " + _COMMON.title()).split()))


def make_prompts(seed: str, count: int, tokens: int, vocabulary: Prompt = WORDS) -> list[Prompt]:
    """Make prompts that begin unlike each other, the same ones for the same seed.

    A prompt that began like another would be answered from a server's prefix cache. A vocabulary
    of fewer tokens than there are prompts makes first tokens repeat.
    """
    chance = random.Random(seed)  # noqa: S311 - wants to be repeatable, not secret
    openings = chance.sample(vocabulary, min(count, len(vocabulary)))
    return [
        (openings[index % len(openings)], *chance.choices(vocabulary, k=tokens - 1))
        for index in range(count)
    ]
