"""A request's spans: the request itself, and the time it spent queued, in prefill, in decode.

They are made when the request has ended, from the same facts as its log line, so that tracing
costs nothing while tokens flow and holds nothing that a user typed. Names follow OpenTelemetry's
conventions for generative AI where there is one; the others begin with ``machd.``.
"""

from __future__ import annotations

import logging
import secrets

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, TraceFlags, TraceState
from opentelemetry.trace.status import Status, StatusCode
from opentelemetry.util.types import AttributeValue

from machd import __version__
from machd.clock import Clock
from machd.generations.record import RequestRecord
from machd.generations.trace_context import TraceContext
from machd.telemetry.span_sender import SpanSender

_EXPORT_TIMEOUT_S = 5.0
_NS = 1_000_000_000
_SCOPE = InstrumentationScope("machd", __version__)
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_TEXT_ENDPOINTS = frozenset({"completions", "infill"})


def otlp_exporter(endpoint: str) -> SpanExporter:
    """Return an exporter of spans to an endpoint, as protobuf over HTTP.

    Headers, certificates and compression are taken from OpenTelemetry's own variables.
    """
    # It says so for every attempt; the sender says it once in a while.
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
    return OTLPSpanExporter(endpoint=endpoint, timeout=_EXPORT_TIMEOUT_S)


class RequestSpans:
    """Makes the spans of each request that ends, and has them sent. Lives on the event loop."""

    def __init__(self, exporter: SpanExporter, clock: Clock) -> None:
        """Send through ``exporter``, from a thread of its own."""
        self._clock = clock
        self._sender = SpanSender(exporter, clock)
        own = Resource({"service.name": "machd", "service.version": __version__})
        self._resource = own.merge(OTELResourceDetector().detect())

    def on_request(self, record: RequestRecord) -> None:
        """Queue the request's spans, if its trace is recorded at all."""
        if record.trace is not None and record.trace.is_sampled:
            self._sender.put(self._spans(record, record.trace))

    def close(self, *, within_s: float) -> None:
        """Send what is left, for ``within_s`` seconds at most; blocks."""
        self._sender.close(within_s=within_s)

    def _spans(self, record: RequestRecord, trace: TraceContext) -> list[ReadableSpan]:
        """The request's span and those of its phases, which lie in it one after another."""
        start_ns = int((self._clock.unix_s() - record.duration_s) * _NS)
        state = TraceState.from_header([trace.state])
        context = _context(trace, secrets.randbits(64) or 1, state)
        parent = trace.parent_span_id
        operation = "text_completion" if record.endpoint in _TEXT_ENDPOINTS else "chat"
        spans = [
            ReadableSpan(
                f"{operation} {record.model}",
                context,
                None if parent is None else _context(trace, int(parent, 16), state, remote=True),
                self._resource,
                _attributes(record, operation),
                kind=SpanKind.SERVER,
                status=_status(record),
                start_time=start_ns,
                end_time=start_ns + int(record.duration_s * _NS),
                instrumentation_scope=_SCOPE,
            )
        ]
        phases = (
            ("queue", record.queue_s),
            ("prefill", record.prefill_s),
            ("decode", record.decode_s),
        )
        for name, duration_s in phases:
            if duration_s is None:
                break
            end_ns = start_ns + int(duration_s * _NS)
            spans.append(
                ReadableSpan(
                    name,
                    _context(trace, secrets.randbits(64) or 1, state),
                    context,
                    self._resource,
                    start_time=start_ns,
                    end_time=end_ns,
                    instrumentation_scope=_SCOPE,
                )
            )
            start_ns = end_ns
        return spans


def _context(
    trace: TraceContext, span_id: int, state: TraceState, *, remote: bool = False
) -> SpanContext:
    return SpanContext(int(trace.trace_id, 16), span_id, remote, _SAMPLED, state)


def _attributes(record: RequestRecord, operation: str) -> dict[str, AttributeValue]:
    known: dict[str, AttributeValue | None] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "machd",
        "gen_ai.request.model": record.model,
        "gen_ai.response.model": record.model,
        "gen_ai.response.finish_reasons": (record.finish_reason,),
        "gen_ai.response.time_to_first_chunk": record.ttft_s,
        "gen_ai.usage.input_tokens": record.prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": record.cached_tokens,
        "gen_ai.usage.output_tokens": record.completion_tokens,
        "error.type": record.error_code,
        "machd.request_id": record.request_id,
        "machd.endpoint": record.endpoint,
        "machd.client": record.client,
        "machd.decode_mode": record.decode_mode.value if record.decode_mode else None,
        "machd.coalesced_with": record.coalesced_with,
    }
    return {name: value for name, value in known.items() if value is not None}


def _status(record: RequestRecord) -> Status:
    """An error where the answer was one; a client that left is none of ours."""
    if record.finish_reason in {"error", "reject"}:
        return Status(StatusCode.ERROR, record.error_code)
    return Status(StatusCode.UNSET)
