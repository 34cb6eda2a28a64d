"""The tokens of a request that generates nothing."""

from __future__ import annotations

from msgspec import Struct


class EncoderUsage(Struct, frozen=True, kw_only=True):
    """Tokens of all inputs, special tokens included."""

    prompt_tokens: int
    total_tokens: int

    @classmethod
    def of(cls, tokens: int) -> EncoderUsage:
        """Return the usage of inputs with so many tokens."""
        return cls(prompt_tokens=tokens, total_tokens=tokens)
