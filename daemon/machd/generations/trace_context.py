"""The trace of a request, from its W3C trace context headers.

``traceparent`` is read strictly and ignored unless it is well formed: its trace id is the only text of a
client that is logged. ``tracestate`` is checked for its shape, exported with the spans, and never logged.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

_TRACEPARENT = re.compile(
    r"(?P<version>[0-9a-f]{2})-(?P<trace_id>[0-9a-f]{32})-(?P<span_id>[0-9a-f]{16})"
    r"-(?P<flags>[0-9a-f]{2})(?P<rest>-.*)?"
)
_VERSION = "00"
_NO_VERSION = "ff"
_SAMPLED_FLAG = 0x01
_MAX_HEADER_CHARACTERS = 512
_MAX_STATE_MEMBERS = 32
_STATE_MEMBER = re.compile(
    r"(?:[a-z][a-z0-9_\-*/]{0,255}|[a-z0-9][a-z0-9_\-*/]{0,240}@[a-z][a-z0-9_\-*/]{0,13})"
    r"=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e]"
)


@dataclass(frozen=True, slots=True)
class TraceContext:
    """A request's place in a trace.

    Attributes:
        trace_id: 32 hexadecimal digits.
        parent_span_id: 16 hexadecimal digits; None where the trace begins here.
        is_sampled: Whether the caller records the trace.
        state: The ``tracestate`` header; empty without one.
    """

    trace_id: str
    parent_span_id: str | None
    is_sampled: bool
    state: str = ""


def new_trace() -> TraceContext:
    """Begin a trace with this request."""
    return TraceContext(secrets.token_hex(16), None, is_sampled=True)


def read_trace(parents: Sequence[str], states: Sequence[str] = ()) -> TraceContext | None:
    """Read the caller's trace.

    Args:
        parents: Every ``traceparent`` header of the request.
        states: Every ``tracestate`` header, in their order.

    Returns:
        None without exactly one well-formed ``traceparent``.
    """
    if len(parents) != 1 or len(parents[0]) > _MAX_HEADER_CHARACTERS:
        return None
    match = _TRACEPARENT.fullmatch(parents[0])
    if match is None or match["version"] == _NO_VERSION:
        return None
    if match["rest"] is not None and match["version"] == _VERSION:
        return None  # later versions may have more fields, this one may not
    if not int(match["trace_id"], 16) or not int(match["span_id"], 16):
        return None
    is_sampled = bool(int(match["flags"], 16) & _SAMPLED_FLAG)
    return TraceContext(match["trace_id"], match["span_id"], is_sampled, _state(states))


def _state(states: Sequence[str]) -> str:
    """Join the members of all headers; empty unless all are well formed."""
    given = ",".join(states)
    if len(given) > _MAX_HEADER_CHARACTERS:
        return ""
    members = [one for part in given.split(",") if (one := part.strip(" \t"))]
    keys = {member.partition("=")[0] for member in members}
    is_well_formed = len(keys) == len(members) <= _MAX_STATE_MEMBERS and all(
        _STATE_MEMBER.fullmatch(member) for member in members
    )
    return ",".join(members) if is_well_formed else ""
