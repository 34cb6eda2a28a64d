"""Spans on their way out: a bounded queue, and a thread that sends it in batches.

OpenTelemetry has such a processor too; this one stops within a deadline of its caller's, and says
how much was lost once in a while instead of once a span.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

import structlog
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from machd.clock import Clock

MAX_QUEUED_SPANS = 4096
_MAX_BATCH_SPANS = 512
_BATCH_WAIT_S = 1.0
_REPORT_INTERVAL_S = 60.0


class SpanSender:
    """Owns an exporter and the one thread that calls it."""

    def __init__(self, exporter: SpanExporter, clock: Clock) -> None:
        self._exporter = exporter
        self._clock = clock
        self._queue: deque[ReadableSpan] = deque()
        self._wake = threading.Event()
        self._is_closing = False
        self._in_flight_count = 0
        self._lost_count = 0
        self._cause = "the queue was full"
        self._reported_s: float | None = None
        self._thread = threading.Thread(target=self._run, name="machd-spans", daemon=True)
        self._thread.start()

    def put(self, spans: Sequence[ReadableSpan]) -> None:
        """Queue a request's spans, or drop them all where there is no room; never waits."""
        if self._is_closing or len(self._queue) + len(spans) > MAX_QUEUED_SPANS:
            self._lost_count += len(spans)
            return
        self._queue.extend(spans)
        if len(self._queue) >= _MAX_BATCH_SPANS:
            self._wake.set()

    def close(self, *, within_s: float) -> None:
        """Send what is queued, for ``within_s`` seconds at most; blocks."""
        self._is_closing = True
        self._wake.set()
        self._thread.join(within_s)
        if self._thread.is_alive():
            self._lost_count += len(self._queue) + self._in_flight_count
            self._queue.clear()
            self._cause = "the stop could not wait for them"
        if self._lost_count:
            self._report()
        self._exporter.shutdown()

    def _run(self) -> None:
        while not self._is_closing:
            self._wake.wait(_BATCH_WAIT_S)
            self._wake.clear()
            self._send_queue()
        self._send_queue()

    def _send_queue(self) -> None:
        while batch := self._take():
            self._in_flight_count = len(batch)
            try:
                result = self._exporter.export(batch)
                cause = "the endpoint did not take them"
            except Exception as error:  # noqa: BLE001 - a library's, and only spans are lost
                result = SpanExportResult.FAILURE
                cause = type(error).__name__
            self._in_flight_count = 0
            if result is not SpanExportResult.SUCCESS:
                self._lost_count += len(batch)
                self._cause = cause
        if self._lost_count:
            self._report_at_times()

    def _take(self) -> list[ReadableSpan]:
        """The oldest spans; only the sending thread takes, so none can go in between."""
        batch: list[ReadableSpan] = []
        while len(batch) < _MAX_BATCH_SPANS:
            try:
                batch.append(self._queue.popleft())
            except IndexError:
                break
        return batch

    def _report_at_times(self) -> None:
        """Report unless that was done lately, or is about to be: the last report has the sum."""
        now_s = self._clock.monotonic_s()
        is_due = self._reported_s is None or now_s - self._reported_s >= _REPORT_INTERVAL_S
        if is_due and not self._is_closing:
            self._reported_s = now_s
            self._report()

    def _report(self) -> None:
        lost_count, self._lost_count = self._lost_count, 0
        structlog.get_logger("machd.tracing").warning(
            "spans.lost",
            count=lost_count,
            cause=self._cause,
            advice="see that tracing.otlp_endpoint takes OTLP over HTTP; requests are not affected",
        )
        self._cause = "the queue was full"
