"""Spans of requests: what they hold, and that sending them harms nothing."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from structlog.testing import capture_logs
from support.clocks.manual_clock import ManualClock
from support.clocks.polling import CEILING_S, wait_until

from machd.clock import SystemClock
from machd.errors import SettingsError
from machd.generations.record import RequestRecord
from machd.generations.trace_context import TraceContext, new_trace
from machd.scheduler.events import DecodeMode
from machd.telemetry.span_sender import MAX_QUEUED_SPANS
from machd.telemetry.spans import RequestSpans
from machd.telemetry.tracing import tracers

TRACE = TraceContext(
    "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331", is_sampled=True, state="a=1,b=2"
)
RECORD = RequestRecord(
    request_id="r-1",
    endpoint="chat_completions",
    decode_mode=DecodeMode.BATCHED,
    prompt_tokens=110,
    first_prompt_tokens=110,
    cached_tokens=10,
    completion_tokens=21,
    queue_s=0.25,
    prefill_s=0.5,
    ttft_s=0.75,
    decode_s=2.0,
    duration_s=3.0,
    finish_reason="stop",
    error_code=None,
    client="alice",
    model="fake",
    trace=TRACE,
)


class _Exporter(SpanExporter):
    """Keeps spans, refuses them, raises, or hangs until it is let go."""

    def __init__(self, failure: SpanExportResult | Exception | None = None) -> None:
        self.spans: list[ReadableSpan] = []
        self.gate = threading.Event()
        self.gate.set()
        self.export_count = 0
        self.is_shut_down = False
        self._failure = failure

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.export_count += 1
        self.gate.wait(CEILING_S)
        if isinstance(self._failure, Exception):
            raise self._failure
        if self._failure is not None:
            return self._failure
        self.spans += spans
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        self.is_shut_down = True


def _spans(*records: RequestRecord) -> list[ReadableSpan]:
    exporter = _Exporter()
    requests = RequestSpans(exporter, ManualClock(1000.0))
    for record in records:
        requests.on_request(record)
    requests.close(within_s=CEILING_S)
    assert exporter.is_shut_down
    return exporter.spans


# What a span holds


def test_a_request_is_a_span_with_its_phases_in_it() -> None:
    """Queue, prefill and decode follow one another within the request, on the wall clock."""
    request, *phases = _spans(RECORD)

    assert request.start_time == 997_000_000_000
    assert request.end_time == 1_000_000_000_000
    assert [(one.name, one.start_time, one.end_time) for one in phases] == [
        ("queue", 997_000_000_000, 997_250_000_000),
        ("prefill", 997_250_000_000, 997_750_000_000),
        ("decode", 997_750_000_000, 999_750_000_000),
    ]
    assert all(one.parent == request.context for one in phases)
    assert len({one.context.span_id for one in (request, *phases)}) == 4


def test_a_request_is_the_callers_span_s_child() -> None:
    """Trace, parent and state are those that the caller sent."""
    request, *_ = _spans(RECORD)

    assert f"{request.context.trace_id:032x}" == TRACE.trace_id
    assert request.parent is not None
    assert f"{request.parent.span_id:016x}" == TRACE.parent_span_id
    assert request.parent.is_remote
    assert request.context.trace_state.to_header() == TRACE.state


def test_a_trace_that_begins_here_has_no_parent() -> None:
    """Its id is the one in the log line."""
    trace = new_trace()
    request, *_ = _spans(replace(RECORD, trace=trace))
    assert request.parent is None
    assert f"{request.context.trace_id:032x}" == trace.trace_id


def test_a_trace_that_is_not_sampled_is_not_exported() -> None:
    """The caller's flag decides, and a request without a trace has no spans."""
    assert _spans(replace(RECORD, trace=replace(TRACE, is_sampled=False))) == []
    assert _spans(replace(RECORD, trace=None)) == []


def test_attributes_follow_the_conventions() -> None:
    """Names of OpenTelemetry's generative AI conventions where there is one."""
    request, *phases = _spans(RECORD)

    assert request.name == "chat fake"
    assert request.kind.name == "SERVER"
    assert dict(request.attributes or {}) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "machd",
        "gen_ai.request.model": "fake",
        "gen_ai.response.model": "fake",
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.response.time_to_first_chunk": 0.75,
        "gen_ai.usage.input_tokens": 110,
        "gen_ai.usage.cache_read.input_tokens": 10,
        "gen_ai.usage.output_tokens": 21,
        "machd.request_id": "r-1",
        "machd.endpoint": "chat_completions",
        "machd.client": "alice",
        "machd.decode_mode": "batched",
    }
    assert not any(phase.attributes for phase in phases)


@pytest.mark.parametrize(
    ("endpoint", "operation"),
    [
        ("chat_completions", "chat"),
        ("completions", "text_completion"),
        ("responses", "chat"),
        ("messages", "chat"),
    ],
)
def test_operations_are_named_as_the_conventions_do(endpoint: str, operation: str) -> None:
    """A conversation is a chat in whatever dialect."""
    assert _spans(replace(RECORD, endpoint=endpoint))[0].name == f"{operation} fake"


def test_a_request_that_never_ran_has_a_queue_only() -> None:
    """What did not happen has no span; the error is on the request's."""
    never = replace(
        RECORD,
        decode_mode=None,
        prefill_s=None,
        ttft_s=None,
        decode_s=None,
        finish_reason="reject",
        error_code="queue_full",
    )
    request, *phases = _spans(never)
    assert [one.name for one in phases] == ["queue"]
    assert not request.status.is_ok
    assert (request.attributes or {})["error.type"] == "queue_full"


# Sending


def test_the_event_loop_never_waits_for_the_exporter() -> None:
    """While the exporter hangs, thousands of requests are told, and take little room."""
    exporter = _Exporter()
    exporter.gate.clear()
    requests = RequestSpans(exporter, SystemClock())
    for _ in range(3000):
        requests.on_request(RECORD)
        assert exporter.spans == [], "the exporter hangs until all was told"
    with capture_logs() as lines:
        exporter.gate.set()
        requests.close(within_s=CEILING_S)

    assert MAX_QUEUED_SPANS <= len(exporter.spans) <= MAX_QUEUED_SPANS + 512
    lost = sum(line["count"] for line in lines if line["event"] == "spans.lost")
    assert lost + len(exporter.spans) == 3000 * 4


def test_a_stop_waits_no_longer_than_its_deadline() -> None:
    """An exporter that hangs is left behind, and what it did not take is reported."""
    exporter = _Exporter()
    exporter.gate.clear()
    requests = RequestSpans(exporter, SystemClock())
    requests.on_request(RECORD)
    with capture_logs() as lines:
        requests.close(within_s=0.2)
    assert exporter.spans == [], "the exporter hangs until the stop has returned"
    exporter.gate.set()

    assert exporter.is_shut_down
    assert [line["event"] for line in lines] == ["spans.lost"]


@pytest.mark.parametrize("failure", [SpanExportResult.FAILURE, OSError("planted")])
def test_failures_are_reported_once_in_a_while(failure: SpanExportResult | Exception) -> None:
    """Many failing exports within a minute are one warning, and the next minute's one has the sum."""
    exporter = _Exporter(failure)
    clock = ManualClock()
    requests = RequestSpans(exporter, clock)

    def fail_again() -> None:
        before = exporter.export_count
        for _ in range(128):  # a whole batch, which is sent at once
            requests.on_request(RECORD)
        wait_until(lambda: exporter.export_count > before, "an export")

    with capture_logs() as lines:
        for _ in range(4):
            fail_again()
        wait_until(lambda: len(lines) == 1, "the first report")
        first_count = len(lines)
        clock.advance(61)
        fail_again()
        wait_until(lambda: len(lines) == 2, "the second report")
        requests.close(within_s=CEILING_S)

    assert first_count == 1
    assert {line["event"] for line in lines} == {"spans.lost"}
    assert sum(line["count"] for line in lines) == 5 * 512
    assert "planted" not in str(lines)


# Settings


def test_without_an_endpoint_nothing_is_traced() -> None:
    """No thread, no observer."""
    assert tracers(None, SystemClock()) == ()


@pytest.mark.parametrize("endpoint", ["collector:4318", "ftp://x/", "http://", "http://[", "/v1"])
def test_an_endpoint_is_a_web_url(endpoint: str) -> None:
    """Anything else is a bad setting, said at start."""
    with pytest.raises(SettingsError) as wrong:
        tracers(endpoint, SystemClock())
    (problem,) = wrong.value.problems
    assert problem.startswith("tracing.otlp_endpoint: ")


def test_the_extra_is_asked_for_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without OpenTelemetry the daemon says what to install."""
    for name in list(sys.modules):
        if name.startswith(("opentelemetry", "machd.telemetry.span")):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(SettingsError) as wrong:
        tracers("http://127.0.0.1:1/v1/traces", SystemClock())
    assert "opentelemetry-sdk>=" in wrong.value.problems[0]


def test_nothing_of_opentelemetry_is_imported_unless_it_is_used() -> None:
    """The daemon's parts can be imported, and asked for no tracers, without the extra."""
    code = (
        "import sys, machd.daemon\n"
        "from machd.clock import SystemClock\n"
        "from machd.telemetry.tracing import tracers\n"
        "tracers(None, SystemClock())\n"
        "print([name for name in sys.modules if name.startswith(('opentelemetry', 'requests'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
