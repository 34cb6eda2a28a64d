"""Prompts of a given length, of which it is known where they part.

A prompt is made of pieces that can be put together: token ids where the server says what its ids
are and takes them, so that lengths and beginnings are exact, and words where it does not. Every
new text opens with a piece that no other one opened with: two that began alike by chance would
find each other in the cache.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self, TypeAlias

from machd.bench.workload import COMMON_WORDS

Piece: TypeAlias = int | str
"""A token's id, or a word."""

WORDS = tuple(dict.fromkeys((*COMMON_WORDS, *(word.capitalize() for word in COMMON_WORDS))))
"""What prompts are made of."""


@dataclass(frozen=True, slots=True)
class Pieces:
    """A prompt, or a part of one: all ids or all words."""

    pieces: tuple[Piece, ...]

    def __add__(self, other: Self) -> Self:
        """One behind the other."""
        return type(self)(self.pieces + other.pieces)

    def __len__(self) -> int:
        """How many pieces there are: tokens, or about as many."""
        return len(self.pieces)

    @property
    def as_sent(self) -> str | list[int]:
        """As the field ``prompt`` takes it."""
        ids = [piece for piece in self.pieces if isinstance(piece, int)]
        return ids or " ".join(str(piece) for piece in self.pieces)


class PromptSource:
    """Texts that begin unlike each other, the same ones for the same seed."""

    def __init__(self, vocabulary: Iterable[Piece], *, seed: str) -> None:
        """Begin anew.

        Args:
            vocabulary: Ids or words; their number is that of different first pieces.
            seed: Another one for each run: a server that keeps running may remember the last one's
                prompts.
        """
        self._vocabulary: Sequence[Piece] = tuple(dict.fromkeys(vocabulary))
        self._random = random.Random(seed)  # noqa: S311 - wants to be repeatable, not secret
        openings = self._random.sample(self._vocabulary, len(self._vocabulary))
        self._openings = itertools.cycle(openings)

    def text(self, tokens: int) -> Pieces:
        """A new one of so many pieces, at least one."""
        rest = self._random.choices(self._vocabulary, k=tokens - 1)
        return Pieces((next(self._openings), *rest))
