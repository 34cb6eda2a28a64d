"""The facts of one request at its end, behind its log line and its metrics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from machd.errors import AbortError, MachdError, UnavailableError
from machd.generations.trace_context import TraceContext
from machd.scheduler.events import CacheReason, DecodeMode, FinishReason


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One HTTP request for a generation, or to an encoder, without any text of a user.

    Attributes:
        generation_id: The answer's id.
        endpoint: Name of the endpoint family, such as ``chat_completions``.
        decode_mode: None when no sequence was ever admitted, and of an encoder.
        completion_tokens: Tokens of all choices.
        first_prompt_tokens: Tokens of the first prompt, to which ``prefill_s`` refers.
        cached_tokens: Reused tokens of all prompts.
        queue_s: From arrival to the first admission, or to the end if there was none.
        prefill_s: From admission to the first token; None without one.
        ttft_s: From arrival to the first token; None without one.
        decode_s: From the first token to the last, by the engine's clock; None without one.
        duration_s: From arrival to the end.
        finish_reason: The first choice's, else ``abort``, ``reject`` or ``error``.
        error_code: The stable code of the error that ended it; None without one.
        client: Name of the API key, or ``anonymous``.
        coalesced_with: Id of the request whose sequence the first admission joined; None for a sequence of
            its own.
        model: The served model's id.
        adapter: Names of its adapters; None without one.
        first_cached_tokens: Reused tokens of the first prompt.
        cache_reason: Why the prefix cache had no more of the first prompt, for operators; None where it never began, and
            without a prefix cache.
        cache_parted_at_tokens: Tokens that the first prompt has in common with a kept text; None as above.
        applied_rules: Names of the rules of ``cache.normalise`` that took something out of the first prompt.
        trace: The trace that the request is part of, if any.
        images: Images of its prompt.
        videos: Videos of its prompt.
        inputs: Texts, or pairs of texts, that an encoder was given; 0 for a generation.
    """

    request_id: str
    endpoint: str
    decode_mode: DecodeMode | None
    prompt_tokens: int
    first_prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    queue_s: float
    prefill_s: float | None
    ttft_s: float | None
    decode_s: float | None
    duration_s: float
    finish_reason: str
    error_code: str | None
    client: str
    coalesced_with: str | None = None
    model: str = ""
    first_cached_tokens: int = 0
    cache_reason: CacheReason | None = None
    cache_parted_at_tokens: int | None = None
    applied_rules: tuple[str, ...] = ()
    trace: TraceContext | None = None
    images: int = 0
    videos: int = 0
    inputs: int = 0
    adapter: str | None = None
    generation_id: str = ""


class RequestObserver(Protocol):
    """A receiver of every request's record, called on the event loop."""

    def on_request(self, record: RequestRecord) -> None:
        """Receive a record; must be quick and must not raise."""
        ...


def finish_reason(reason: str | None, error: MachdError | None) -> str:
    """Return the finish reason of a request's record; ``reason`` is that of its first choice, None without one."""
    match error:
        case None:
            return reason or FinishReason.ABORT.value
        case UnavailableError():
            return "reject"
        case AbortError():
            return FinishReason.ABORT.value
        case _:
            return FinishReason.ERROR.value
