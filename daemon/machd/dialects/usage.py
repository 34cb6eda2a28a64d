"""Usage: the tokens of an answer."""

from __future__ import annotations

from dataclasses import asdict
from typing import Literal, Self, TypeAlias

from msgspec import UNSET, Struct, UnsetType

from machd.generations.generation import GenerationUsage
from machd.reading.prompt_places import PromptPart
from machd.scheduler.events import CacheReason

FinishReason: TypeAlias = Literal["stop", "length"]
"""``stop``: the model's end of text or a stop; ``length``: ``max_tokens`` or the context."""


class PromptPlaceDetails(Struct, frozen=True, kw_only=True):
    """A place in a conversation.

    Attributes:
        part: ``template`` is what the chat template writes by itself.
        message_index: The request's message or item, from 0; of other parts the one behind them. Null behind all, and for one
            that is in another field of the request.
        role: The role of that message.
        character: Characters of the message's text before the place, whose blocks are joined as the template sees them; of
            the prompt of a text. Null in other parts and in images.
        tool_index: The tool, from 0; null in other parts.
    """

    part: PromptPart
    message_index: int | None
    role: str | None
    character: int | None
    tool_index: int | None


class RemovedTextDetails(Struct, frozen=True, kw_only=True):
    """A text that a rule of ``cache.normalise`` took out of the prompt.

    Attributes:
        rule: Name of the rule.
        message_index: The request's message or item that had it, from 0; null for one in another field, and for a text of the
            chat template.
        role: The role of that message; null for a text of the chat template.
        characters: Its length.
    """

    rule: str
    message_index: int | None
    role: str | None
    characters: int


class CacheDiagnosisDetails(Struct, frozen=True, kw_only=True):
    """Why the prefix cache had no more of the first prompt.

    Attributes:
        parted_at_tokens: Tokens in common with a text that is kept.
        parted_at: The same place in the conversation or text; null where that is not known.
        normalised: What the operator's rules took out of the prompt; left out where that is nothing.
    """

    reason: CacheReason
    parted_at_tokens: int
    parted_at: PromptPlaceDetails | None
    normalised: list[RemovedTextDetails] | UnsetType = UNSET

    @classmethod
    def of(cls, usage: GenerationUsage, *, is_asked: bool) -> Self | UnsetType:
        """Return what is known of a generation's first prompt, if a client asks."""
        told, place = usage.diagnosis, usage.parted_at
        if told is None or not is_asked:
            return UNSET
        return cls(
            reason=told.client_reason,
            parted_at_tokens=told.parted_at_tokens,
            parted_at=None if place is None else PromptPlaceDetails(**asdict(place)),
            normalised=[RemovedTextDetails(**asdict(one)) for one in usage.removed] or UNSET,
        )


class PromptTokensDetails(Struct, frozen=True, kw_only=True):
    """Part of the prompt's tokens.

    Attributes:
        cached_tokens: Taken from the prefix cache instead of computed.
        cache_diagnosis: Left out unless asked for, and without a prefix cache.
    """

    cached_tokens: int = 0
    cache_diagnosis: CacheDiagnosisDetails | UnsetType = UNSET


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
    def of(cls, usage: GenerationUsage, *, tells_cache: bool = False) -> Self:
        """Return the usage of a generation, with its total, and with the cache's diagnosis if ``tells_cache``."""
        return cls(
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            total_tokens=usage.prompt_tokens + usage.completion_tokens,
            prompt_tokens_details=PromptTokensDetails(
                cached_tokens=usage.cached_tokens,
                cache_diagnosis=CacheDiagnosisDetails.of(usage, is_asked=tells_cache),
            ),
            completion_tokens_details=CompletionTokensDetails(
                reasoning_tokens=usage.reasoning_tokens
            ),
        )


def wire_finish_reason(reason: str | None) -> FinishReason | None:
    """Return the finish reason of a choice that ended well; None while it goes on."""
    if reason is None:
        return None
    return "length" if reason == "length" else "stop"
