"""Which texts are computed together: pure."""

from __future__ import annotations

from collections.abc import Sequence

MAX_PASS_TOKENS = 2048
"""Most tokens of a pass of several texts, those of padding included: a new text waits for one pass at most, and other
models on the same device for a bounded time."""

_MAX_PADDED = 1.25
"""Most tokens that a pass computes for each token of its texts."""

_MAX_COMPARED = 1024
"""Waiting texts that are looked at for one pass; their order is kept beyond."""


def next_pass(lengths: Sequence[int], *, packs: bool) -> list[int]:
    """Choose the texts of the next pass: the oldest, and those that waste least beside it.

    Args:
        lengths: Tokens of the waiting texts, the oldest first; at least one.
        packs: Whether texts lie behind one another; otherwise all take as much as the longest.

    Returns:
        Their positions in ``lengths``; the oldest is the first.
    """
    oldest = lengths[0]
    compared: Sequence[int] = range(min(len(lengths), _MAX_COMPARED))
    if not packs:
        compared = sorted(compared, key=lambda place: abs(lengths[place] - oldest))
    chosen = list[int]()
    longest = total = 0
    for place in compared:
        longest, total = max(longest, lengths[place]), total + lengths[place]
        computed = total if packs else longest * (len(chosen) + 1)
        if chosen and (computed > MAX_PASS_TOKENS or computed > _MAX_PADDED * total):
            break
        chosen.append(place)
    return chosen
