"""Stamps of the gate on every request: an id, an arrival time, a trace, the envelope of errors, and the application's state."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping

from litestar.types import Scope

from machd.generations.trace_context import TraceContext
from machd.http.envelope import Envelope

_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_REQUEST_ID_KEY = "machd_request_id"
_ARRIVED_KEY = "machd_arrived_s"
_TRACE_KEY = "machd_trace"
_ENVELOPE_KEY = "machd_envelope"


def stamp(
    scope: Scope,
    envelope: Envelope,
    *,
    arrived_s: float,
    state: Mapping[str, object],
    trace: TraceContext | None = None,
) -> str:
    """Write them on a request; returns its id, which is the client's own if that looks like one.

    The ``state`` is the application's: each change of settings makes another application, and all of them have the same routes.
    """
    given = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")
    stamped = given if _REQUEST_ID.fullmatch(given) else f"req-{secrets.token_hex(12)}"
    own = {
        _REQUEST_ID_KEY: stamped,
        _ARRIVED_KEY: arrived_s,
        _TRACE_KEY: trace,
        _ENVELOPE_KEY: envelope,
    }
    scope.setdefault("state", {}).update(state, **own)
    return stamped


def request_id(scope: Scope) -> str:
    """The id that the gate gave the request."""
    return str(scope["state"][_REQUEST_ID_KEY])


def envelope(scope: Scope) -> Envelope:
    """The envelope of errors that the gate chose."""
    chosen = scope["state"][_ENVELOPE_KEY]
    assert isinstance(chosen, Envelope), "the gate writes nothing else"
    return chosen


def arrived_s(scope: Scope) -> float:
    """When the request came, on the monotonic clock."""
    return float(scope["state"][_ARRIVED_KEY])


def trace_context(scope: Scope) -> TraceContext | None:
    """The trace that the caller says the request is part of."""
    trace = scope["state"][_TRACE_KEY]
    assert trace is None or isinstance(trace, TraceContext), "the gate writes nothing else"
    return trace
