"""Shorten a prompt that is too long: a text to its end, a conversation to its latest turns."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

from machd.request.generation import WHOLE_ROOM

_ANSWER_SHARE = 4
"""Inverse share of the context that is kept for the answer to a shortened prompt."""

_SYSTEM = "system"
_USER = "user"


def max_prompt_tokens(asked: int, context_tokens: int) -> int:
    """Tokens that a prompt may have before it is shortened; ``asked`` may be ``WHOLE_ROOM``."""
    whole = max(1, context_tokens - context_tokens // _ANSWER_SHARE)
    return whole if asked == WHOLE_ROOM else min(asked, whole)


def kept_messages(
    messages: Sequence[dict[str, object]], fits: Callable[[list[dict[str, object]]], bool]
) -> list[dict[str, object]]:
    """Drop as few of the oldest turns as possible, and return the messages left.

    A turn begins with a message of the user, so that no result is kept without its call. The system
    messages at the beginning and the last turn stay, whether that fits or not.

    ``fits`` is asked about as often as the logarithm of the number of turns.
    """
    opening = next(
        (index for index, one in enumerate(messages) if one.get("role") != _SYSTEM), len(messages)
    )
    starts = [
        index
        for index, one in enumerate(messages)
        if index > opening and one.get("role") == _USER and _begins_turn(messages, index)
    ]

    def kept(start: int) -> list[dict[str, object]]:
        return [*messages[:opening], *messages[start:]]

    if not starts:
        return list(messages)
    first = bisect_left(starts, True, key=lambda start: fits(kept(start)))  # noqa: FBT003
    return kept(starts[min(first, len(starts) - 1)])


def _begins_turn(messages: Sequence[dict[str, object]], index: int) -> bool:
    """Return whether a user's message begins a turn: the message before it is not the user's."""
    return messages[index - 1].get("role") != _USER
