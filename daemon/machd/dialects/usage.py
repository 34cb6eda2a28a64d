"""Usage: the tokens of an answer."""

from __future__ import annotations

from typing import Literal, Self, TypeAlias

from msgspec import Struct

from machd.generations.generation import GenerationUsage

FinishReason: TypeAlias = Literal["stop", "length"]
"""``stop``: the model's end of text or a stop; ``length``: ``max_tokens`` or the context."""


class PromptTokensDetails(Struct, frozen=True, kw_only=True):
    """Part of the prompt's tokens.

    Attributes:
        cached_tokens: Taken from the prefix cache instead of computed.
    """

    cached_tokens: int = 0


class CompletionTokensDetails(Struct, frozen=True, kw_only=True):
    """Part of the completion's tokens.

    Attributes:
        reasoning_tokens: Generated as reasoning, what marks its begin and end included.
        accepted_prediction_tokens: Zero; tokens of a ``prediction`` are not told apart.
        rejected_prediction_tokens: Zero; the same.
    """

    reasoning_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


class Usage(Struct, frozen=True, kw_only=True):
    """Tokens of a request, summed over its choices; the prompt counts once."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails

    @classmethod
    def of(cls, usage: GenerationUsage) -> Self:
        """Return the usage of a generation, with its total."""
        return cls(
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            total_tokens=usage.prompt_tokens + usage.completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=usage.cached_tokens),
            completion_tokens_details=CompletionTokensDetails(
                reasoning_tokens=usage.reasoning_tokens
            ),
        )


def wire_finish_reason(reason: str | None) -> FinishReason | None:
    """Return the finish reason of a choice that ended well; None while it goes on."""
    if reason is None:
        return None
    return "length" if reason == "length" else "stop"
