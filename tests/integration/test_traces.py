"""Traces from the caller's header to a collector, over the wire."""

from __future__ import annotations

import threading
import time
from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs
from support.clocks.polling import CEILING_S, wait_until
from support.daemon.running_daemon import RunningDaemon
from support.engines.dialogue import chat, completion
from support.programs.otlp_receiver import OtlpReceiver, ReceivedSpan

TRACE = "0af7651916cd43dd8448eb211c80319c"
SPAN = "b7ad6b7169203331"
PARENT = f"00-{TRACE}-{SPAN}-01"
CANARY = "xyzzy-canary"


def _finished(lines: list[Any]) -> list[Any]:
    return [line for line in lines if line["event"] == "request.finished"]


def _wait(release: threading.Event) -> None:
    release.wait()  # without an end of its own: the daemon has to end first


@pytest.fixture(name="patient_stop")
def _patient_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the last spans take as long as a busy machine needs."""
    monkeypatch.setattr("machd.daemon._LAST_SPANS_S", CEILING_S)


def _requests(receiver: OtlpReceiver) -> list[ReceivedSpan]:
    return [one for one in receiver.spans if one.attributes]


def test_the_callers_trace_is_in_the_log() -> None:
    """A well-formed traceparent's id is the line's; anything else leaves it empty."""
    with RunningDaemon() as daemon, capture_logs() as lines:
        for parents in ([PARENT], [PARENT.upper()], [CANARY], [PARENT, PARENT], []):
            headers = [("traceparent", one) for one in parents]
            url = f"{daemon.url}/v1/completions"
            assert httpx.post(url, json=completion(max_tokens=1), headers=headers).is_success
        # A line is written after its answer.
        wait_until(lambda: len(_finished(lines)) == 5, "five lines", seen=lambda: lines)

    assert [line["trace_id"] for line in _finished(lines)] == [TRACE, None, None, None, None]
    assert CANARY not in str(lines)


@pytest.mark.usefixtures("patient_stop")
def test_spans_reach_the_collector() -> None:
    """A stop sends what is left: the request as the caller's child, and its phases as its own."""
    began_ns = time.time_ns()
    with OtlpReceiver() as receiver:
        with RunningDaemon(flags={"tracing.otlp_endpoint": receiver.endpoint}) as daemon:
            httpx.post(
                f"{daemon.url}/v1/chat/completions",
                json=chat(CANARY, max_tokens=4, user=CANARY, metadata={CANARY: CANARY}),
                headers={"traceparent": PARENT, "tracestate": "vendor=1"},
            ).raise_for_status()
        ended_ns = time.time_ns()

    by_name = {one.name: one for one in receiver.spans}
    request = by_name.pop("chat fake")
    assert set(by_name) == {"queue", "prefill", "decode"}
    assert request.span.trace_id.hex() == TRACE
    assert request.span.parent_span_id.hex() == SPAN
    assert request.span.trace_state == "vendor=1"
    assert request.span.kind == request.span.SPAN_KIND_SERVER
    assert request.attributes["gen_ai.usage.output_tokens"] == 4
    assert request.attributes["gen_ai.response.finish_reasons"] == ["length"]
    assert request.resource["service.name"] == "machd"
    for one in by_name.values():
        assert one.span.parent_span_id == request.span.span_id
        assert one.span.trace_id == request.span.trace_id
        assert request.span.start_time_unix_nano <= one.span.start_time_unix_nano
        assert one.span.start_time_unix_nano <= one.span.end_time_unix_nano
        # The wall clock and the monotonic one are read one after the other.
        assert one.span.end_time_unix_nano <= request.span.end_time_unix_nano + 1_000
    assert began_ns - 50_000_000 <= request.span.start_time_unix_nano
    assert request.span.end_time_unix_nano <= ended_ns + 50_000_000
    assert CANARY.encode() not in receiver.raw


@pytest.mark.usefixtures("patient_stop")
def test_a_trace_that_begins_here_is_the_one_in_the_log() -> None:
    """With tracing on, every request has a trace, and its log line names it."""
    with (
        OtlpReceiver() as receiver,
        capture_logs() as lines,
        RunningDaemon(flags={"tracing.otlp_endpoint": receiver.endpoint}) as daemon,
    ):
        httpx.post(f"{daemon.url}/v1/completions", json=completion(max_tokens=1))
        daemon.stop()
        assert daemon.join(CEILING_S)

    (line,) = _finished(lines)
    (request,) = _requests(receiver)
    assert request.span.trace_id.hex() == line["trace_id"]
    assert request.span.parent_span_id == b""
    assert request.name == "text_completion fake"


def test_the_callers_decision_not_to_record_is_kept() -> None:
    """Nothing is exported of a trace that its caller does not sample; the log names it still."""
    with (
        OtlpReceiver() as receiver,
        capture_logs() as lines,
        RunningDaemon(flags={"tracing.otlp_endpoint": receiver.endpoint}) as daemon,
    ):
        headers = {"traceparent": f"00-{TRACE}-{SPAN}-00"}
        httpx.post(f"{daemon.url}/v1/completions", json=completion(max_tokens=1), headers=headers)
        daemon.stop()
        assert daemon.join(CEILING_S)

    assert [line["trace_id"] for line in _finished(lines)] == [TRACE]
    assert receiver.post_count == 0


@pytest.mark.parametrize("fault", ["refuses", "hangs", "absent"])
def test_a_broken_collector_harms_no_request(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests are answered, the stop does not wait for the collector, and a warning says what was lost."""
    monkeypatch.setattr("machd.telemetry.spans._EXPORT_TIMEOUT_S", 3600.0)
    release = threading.Event()
    status = 400 if fault == "refuses" else 200
    if fault != "hangs":
        release.set()
    with OtlpReceiver(status=status, before_answer=lambda: _wait(release)) as receiver:
        endpoint = "http://127.0.0.1:1/v1/traces" if fault == "absent" else receiver.endpoint
        daemon = RunningDaemon(flags={"tracing.otlp_endpoint": endpoint})
        with capture_logs() as lines, daemon:
            url = f"{daemon.url}/v1/completions"
            for _ in range(20):
                assert httpx.post(url, json=completion(max_tokens=2), timeout=CEILING_S).is_success
            daemon.stop()
            has_ended = daemon.join(CEILING_S)
            release.set()

    assert has_ended, "the stop waited for the collector"
    lost = [line for line in lines if line["event"] == "spans.lost"]
    assert 1 <= len(lost) <= 2
    assert sum(line["count"] for line in lost) <= 80
    assert daemon.error is None
