"""What a prefix cache found of a prompt, as the server says it by ``cached_tokens``."""

from __future__ import annotations

from enum import StrEnum

from machd.bench.timing import RequestTiming


class Lookup(StrEnum):
    """How much of a prompt need not be computed."""

    MISS = "MISS"
    """Nothing was found."""
    PREFIX_HIT = "PREFIX_HIT"
    """A beginning."""
    HIT = "HIT"
    """All of it but the last token, which is computed to get the first one of the answer."""
    UNKNOWN = "UNKNOWN"
    """The server does not say."""

    @classmethod
    def of(cls, timing: RequestTiming) -> Lookup:
        """What the server says of a request."""
        cached_tokens = timing.cached_tokens
        if cached_tokens is None or timing.prompt_tokens == 0:
            return cls.UNKNOWN
        if cached_tokens == 0:
            return cls.MISS
        return cls.HIT if cached_tokens >= timing.prompt_tokens - 1 else cls.PREFIX_HIT
