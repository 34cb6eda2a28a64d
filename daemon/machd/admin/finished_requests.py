"""The last finished requests: their clients, times and counts, never their texts."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime

from msgspec import Struct

from machd.clock import Clock
from machd.generations.record import RequestRecord
from machd.scheduler.events import CacheReason, DecodeMode
from machd.telemetry.logs import milliseconds, tokens_per_s

MAX_FINISHED = 200
"""Requests that are kept."""


class FinishedRequest(Struct, frozen=True, kw_only=True):
    """One finished request, with the numbers of its log line ``request.finished``.

    Attributes:
        id: The answer's id.
        request_id: Of its X-Request-Id header.
        endpoint: Such as ``chat_completions``.
        client: Name of the API key, or ``anonymous``.
        adapter: Name of its adapter, several joined by a plus sign; null for the model itself.
        finished_at: When it ended, in RFC 3339.
        finish_reason: The first choice's, else ``abort``, ``reject`` or ``error``.
        error: Code of the error that ended it; null without one.
        queue_ms: From arrival to its slot, or to its end if it never had one.
        ttft_ms: From arrival to its first token; null without one.
        latency_ms: From arrival to its end.
        cached_tokens: Prompt tokens found in the prefix cache.
        cache_reason: Why it had no more of the first prompt; null of one that it was not asked about.
        cache_parted_at_tokens: Tokens that the first prompt has in common with a kept text; null as above.
        normalised: Rules of ``cache.normalise`` that took something out of the first prompt.
        prompt_tps: Prompt tokens computed a second; null where none was.
        generation_tps: Completion tokens a second; null before the second one.
        decode_mode: Null of one that never had a slot, and of an encoder.
    """

    id: str
    request_id: str
    endpoint: str
    client: str
    model: str
    adapter: str | None
    finished_at: str
    finish_reason: str
    error: str | None
    queue_ms: float | None
    ttft_ms: float | None
    latency_ms: float | None
    prompt_tokens: int
    cached_tokens: int
    cache_reason: CacheReason | None
    cache_parted_at_tokens: int | None
    normalised: list[str]
    completion_tokens: int
    prompt_tps: float | None
    generation_tps: float | None
    decode_mode: DecodeMode | None


class FinishedRequestList(Struct, frozen=True, kw_only=True):
    """The last finished requests, the newest first."""

    requests: list[FinishedRequest]


class FinishedRequests:
    """Keeps the last finished requests. Lives on the event loop."""

    def __init__(
        self, clock: Clock, on_finished: Callable[[FinishedRequest], None] = lambda _: None
    ) -> None:
        """Begin with none; ``on_finished`` is called with each, and must be quick."""
        self._clock = clock
        self._on_finished = on_finished
        self._kept: deque[FinishedRequest] = deque(maxlen=MAX_FINISHED)

    @property
    def newest_first(self) -> list[FinishedRequest]:
        """The requests that are kept."""
        return list(reversed(self._kept))

    def on_request(self, record: RequestRecord) -> None:
        """Keep a request that has ended."""
        finished = _finished(record, self._clock.unix_s())
        self._kept.append(finished)
        self._on_finished(finished)


def _finished(record: RequestRecord, unix_s: float) -> FinishedRequest:
    return FinishedRequest(
        id=record.generation_id,
        request_id=record.request_id,
        endpoint=record.endpoint,
        client=record.client,
        model=record.model,
        adapter=record.adapter,
        finished_at=datetime.fromtimestamp(unix_s, UTC).isoformat(timespec="milliseconds"),
        finish_reason=record.finish_reason,
        error=record.error_code,
        queue_ms=milliseconds(record.queue_s),
        ttft_ms=milliseconds(record.ttft_s),
        latency_ms=milliseconds(record.duration_s),
        prompt_tokens=record.prompt_tokens,
        cached_tokens=record.cached_tokens,
        cache_reason=record.cache_reason,
        cache_parted_at_tokens=record.cache_parted_at_tokens,
        normalised=list(record.applied_rules),
        completion_tokens=record.completion_tokens,
        prompt_tps=tokens_per_s(
            record.first_prompt_tokens - record.first_cached_tokens, record.prefill_s
        ),
        generation_tps=tokens_per_s(record.completion_tokens - 1, record.decode_s),
        decode_mode=record.decode_mode,
    )
