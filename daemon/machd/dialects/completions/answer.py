"""Answers of ``POST /v1/completions``; whole and in chunks they have the same shape."""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from machd.dialects.logprobs import CompletionChoiceLogprobs, PromptTokenLogprobs
from machd.dialects.prompt_progress import PromptProgress
from machd.dialects.usage import FinishReason, Usage


class CompletionChoice(Struct, frozen=True, kw_only=True):
    """One completion, or the next piece of it.

    Attributes:
        index: Counts from 0: the completions of the first prompt, then those of the second.
        finish_reason: Null in every chunk but the last of its choice.
        prompt_logprobs: Left out unless asked for.
    """

    index: int
    text: str
    logprobs: CompletionChoiceLogprobs | None = None
    finish_reason: FinishReason | None
    prompt_logprobs: PromptTokenLogprobs | UnsetType = UNSET


class Completion(Struct, frozen=True, kw_only=True):
    """An answer, or one event of a stream.

    Attributes:
        created: Seconds since 1970, the same in every chunk.
        usage: Always there in a whole answer. In a stream, with
            ``stream_options.include_usage``: null, and the usage in the last chunk, which has no
            choices; without it: not there at all.
        prompt_progress: With ``return_progress``, in chunks of a stream that add no text.
    """

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str | None = None
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_progress: PromptProgress | UnsetType = UNSET
