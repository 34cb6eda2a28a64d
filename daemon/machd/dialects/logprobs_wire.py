"""Log-probabilities in the two shapes of OpenAI's API. All are natural logarithms."""

from __future__ import annotations

from typing import TypeAlias

from msgspec import Struct

LOGPROB_FLOOR = -9999.0
"""What OpenAI's API writes for a token of no probability; JSON has no minus infinity."""


def wire_logprob(logprob: float) -> float:
    """A log-probability that JSON can carry: finite, and at least ``LOGPROB_FLOOR``."""
    # The floor stands first so that NaN, which no comparison prefers, becomes the floor too.
    return max(LOGPROB_FLOOR, logprob)


class ChatTopLogprob(Struct, frozen=True, kw_only=True):
    """One alternative at a position.

    Attributes:
        token: The token as text; U+FFFD stands for bytes that are no whole character.
        bytes: The token's own bytes, 0 to 255 each.
    """

    token: str
    logprob: float
    bytes: list[int] | None = None


class ChatTokenLogprob(ChatTopLogprob, frozen=True, kw_only=True):
    """The token at a position, with its likeliest alternatives, best first."""

    top_logprobs: list[ChatTopLogprob]


class ChatLogprobs(Struct, frozen=True, kw_only=True):
    """``logprobs`` of a chat choice: one entry for each token that the choice brings."""

    content: list[ChatTokenLogprob] | None
    refusal: None = None


class CompletionChoiceLogprobs(Struct, frozen=True, kw_only=True):
    """``logprobs`` of a completion's choice: columns of equal length, one row a token.

    Attributes:
        token_logprobs: Null for the first token of an echoed prompt, which nothing precedes.
        top_logprobs: Text of a token to its log-probability; null where none were asked for, and for
            the first token of an echoed prompt.
        text_offset: Where each token's text starts in the choice's whole text, in characters.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class PromptTokenLogprob(Struct, frozen=True, kw_only=True):
    """A token at a position of the prompt, in vLLM's shape.

    Attributes:
        rank: 1 for the most likely token of the vocabulary, 2 for the next one.
        decoded_token: The token as text; U+FFFD stands for bytes that are no whole character.
    """

    logprob: float
    rank: int
    decoded_token: str


PromptTokenLogprobs: TypeAlias = list[dict[str, PromptTokenLogprob] | None]
"""``prompt_logprobs``: one entry for each token of the prompt, null for the first.

An entry maps token ids to their log-probabilities: the prompt's own token, then the likeliest ones.
"""
