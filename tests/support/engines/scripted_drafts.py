"""Scripts of drafts for engines without a model: any counts, the same each time."""

from __future__ import annotations

import zlib

from support.engines.fake_engine import DraftScript


def drafts_by(number: int) -> DraftScript:
    """Make the script of a number; 0 drafts nothing, 1 has all drafts accepted, 2 none."""

    def drafts(position: int, max_tokens: int) -> tuple[int, int]:
        if number < 3:
            return ((0, 0), (max_tokens, max_tokens), (max_tokens, 0))[number]
        drawn = zlib.crc32(bytes((number % 256, position % 256, max_tokens % 256)))
        drafted = drawn % (max_tokens + 1)
        return drafted, (drawn >> 8) % (drafted + 1)

    return drafts
