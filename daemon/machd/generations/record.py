"""The facts of one request at its end, behind its log line and its metrics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from machd.generations.trace_context import TraceContext
from machd.scheduler.events import DecodeMode


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One HTTP request that asked for a generation. Holds nothing that a user typed.

    Attributes:
        endpoint: Name of the endpoint family, such as ``chat_completions``.
        decode_mode: None when no sequence was ever admitted.
        completion_tokens: Over all choices.
        first_prompt_tokens: Of the first prompt alone, which ``prefill_s`` is about.
        cached_tokens: Of all prompts, what was not computed again.
        queue_s: From arrival to the first admission, or to the end if there was none.
        prefill_s: From admission to the first token; None without one.
        ttft_s: From arrival to the first token; None without one.
        decode_s: From the first token to the last, as the engine made them; None without one.
        duration_s: From arrival to the end.
        finish_reason: Of the first choice, else ``abort``, ``reject`` or ``error``.
        error_code: The stable code of the error that ended it; None for a good end.
        client: Name of the API key, or ``anonymous``.
        coalesced_with: Id of the request whose decode the first admission shared; None for a
            request that was decoded for itself.
        model: The served model's id.
        first_cached_tokens: Of the first prompt alone.
        trace: The trace that the request is part of, if any.
        images: Images of its prompt.
        videos: Videos of its prompt.
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
    trace: TraceContext | None = None
    images: int = 0
    videos: int = 0


class RequestObserver(Protocol):
    """Told of every request that ends, on the event loop."""

    def on_request(self, record: RequestRecord) -> None:
        """Take note; must be quick and must not raise."""
        ...
