"""A collector of traces: takes OTLP over HTTP on a free port and keeps the spans."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from support.clocks.polling import CEILING_S


@dataclass(frozen=True, slots=True)
class ReceivedSpan:
    """A span as it came, its attributes and its resource's as plain values."""

    span: Span
    attributes: dict[str, Any]
    resource: dict[str, Any]

    @property
    def name(self) -> str:
        """The span's name."""
        return self.span.name


class OtlpReceiver:
    """A context manager: inside it ``endpoint`` takes spans."""

    def __init__(
        self, *, status: int = 200, before_answer: Callable[[], None] = lambda: None
    ) -> None:
        """Answer every post with ``status``, after ``before_answer``."""
        receiver = self
        self.spans: list[ReceivedSpan] = []
        self.raw = b""
        self.post_count = 0

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                assert self.path == "/v1/traces"
                receiver.post_count += 1
                before_answer()
                if status == 200:
                    receiver.take(body)
                self.send_response(status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}/v1/traces"

    def __enter__(self) -> Self:
        """Serve on a thread."""
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.02,), daemon=True
        )
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(CEILING_S)

    def take(self, body: bytes) -> None:
        """Keep the spans of one post."""
        self.raw += body
        for group in ExportTraceServiceRequest.FromString(body).resource_spans:
            resource = _plain(group.resource.attributes)
            self.spans += [
                ReceivedSpan(span, _plain(span.attributes), resource)
                for scope in group.scope_spans
                for span in scope.spans
            ]


def _plain(attributes: Any) -> dict[str, Any]:
    return {one.key: _value(one.value) for one in attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(one) for one in value.array_value.values]
    return getattr(value, kind)
