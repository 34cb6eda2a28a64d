"""Spans of requests over OTLP, where the settings name an endpoint.

OpenTelemetry is an extra that most daemons do without: nothing of it is imported here unless an
endpoint is set.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol
from urllib.parse import urlsplit

from machd.clock import Clock
from machd.errors import SettingsError
from machd.generations.record import RequestRecord
from machd.installed import how_to_install


class RequestTracer(Protocol):
    """Exports what it is told of, in the background."""

    def on_request(self, record: RequestRecord) -> None:
        """Make the request's spans; never waits."""
        ...

    def close(self, *, within_s: float) -> None:
        """Send what is left, for ``within_s`` seconds at most. Blocks; not for the event loop."""
        ...


def tracers(otlp_endpoint: str | None, clock: Clock) -> Sequence[RequestTracer]:
    """Return the exporters of spans to a whole URL; none without one.

    Raises:
        SettingsError: It is no such URL, or the extra is not installed.
    """
    if otlp_endpoint is None:
        return ()
    if not _is_web_url(otlp_endpoint):
        problem = "not an http:// or https:// URL, such as http://127.0.0.1:4318/v1/traces"
        raise SettingsError([f"tracing.otlp_endpoint: {problem}"])
    try:
        from machd.telemetry.spans import RequestSpans, otlp_exporter  # noqa: PLC0415 - an extra
    except ModuleNotFoundError as error:
        raise SettingsError(
            [f"tracing.otlp_endpoint: {error.name} is not installed: {how_to_install('otel')}"]
        ) from None
    return (RequestSpans(otlp_exporter(otlp_endpoint), clock),)


def _is_web_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
    except ValueError:
        return False
    return parts.scheme in {"http", "https"} and bool(parts.hostname)
