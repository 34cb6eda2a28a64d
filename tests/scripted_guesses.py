"""How much engines without a model guess ahead, and how much of it is right: anything, and the same each time."""

from __future__ import annotations

import zlib

from machd.engine.fake.engine import Guesses


def guesses_by(number: int) -> Guesses:
    """A script of guesses for each number; 0 guesses nothing, 1 everything rightly, 2 all wrongly."""

    def guesses(position: int, max_tokens: int) -> tuple[int, int]:
        if number < 3:
            return ((0, 0), (max_tokens, max_tokens), (max_tokens, 0))[number]
        drawn = zlib.crc32(bytes((number % 256, position % 256, max_tokens % 256)))
        drafted = drawn % (max_tokens + 1)
        return drafted, (drawn >> 8) % (drafted + 1)

    return guesses
