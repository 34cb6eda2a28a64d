"""The outcome of looking a prompt up in a prefix cache, beside the expected one."""

from __future__ import annotations

from enum import StrEnum

from machd_bench.answer import Answer

_SOON = 0.5
"""Of a first prompt's time: a prompt that was answered sooner was not computed whole."""
_CHAT_SHARE = 0.1
"""Of a new prompt, what may be found all the same where a chat's template is in front of it."""


class Lookup(StrEnum):
    """The share of a prompt that a prefix cache had, as ``cached_tokens`` says it."""

    MISS = "MISS"
    PREFIX_HIT = "PREFIX_HIT"
    HIT = "HIT"
    """All of it but the last token, which is computed to get the first one of the answer."""
    UNKNOWN = "UNKNOWN"
    """The server does not say, and the time decides."""

    @classmethod
    def of(cls, answer: Answer) -> Lookup:
        """Read a server's own count."""
        if answer.cached_tokens is None or answer.prompt_tokens == 0:
            return cls.UNKNOWN
        if answer.cached_tokens == 0:
            return cls.MISS
        is_whole = answer.cached_tokens >= answer.prompt_tokens - 1
        return cls.HIT if is_whole else cls.PREFIX_HIT


def is_met(expected: Lookup, least: int, answer: Answer, first_s: float, *, is_chat: bool) -> bool:
    """Tell whether an answer found the expected, at least so many tokens of a beginning.

    A server that does not say is judged by its time, over the ``first_s`` that a new prompt took.
    """
    actual = Lookup.of(answer)
    if actual is Lookup.UNKNOWN:
        return (answer.ttft_s < _SOON * first_s) == (expected is not Lookup.MISS)
    cached_tokens = answer.cached_tokens or 0
    if expected is Lookup.MISS:
        return cached_tokens <= (_CHAT_SHARE if is_chat else 0) * answer.prompt_tokens
    return actual is expected and cached_tokens >= least
