"""Server-sent events out of timed pieces of a byte stream, taken apart after the stream has ended.

While tokens arrive the client only notes times and bytes: it shares the machine's cores with the
server, and what it computes then would be measured as the server's latency.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TimedPiece:
    """Bytes of a body as they came.

    Attributes:
        arrived_s: When, on the client's monotonic clock.
    """

    arrived_s: float
    data: bytes


@dataclass(frozen=True, slots=True)
class TimedEvent:
    """One event's data, at the moment its last byte was here."""

    arrived_s: float
    data: bytes


def timed_events(pieces: Iterable[TimedPiece]) -> list[TimedEvent]:
    """The events of a stream; comments are left out, and so is an event that never ended.

    Takes LF and CRLF line ends, in the same stream too, as the specification of server-sent events
    does. (It also allows CR alone, which no server of this API sends.)
    """
    events: list[TimedEvent] = []
    lines: list[bytes] = []
    rest = b""
    for piece in pieces:
        *complete, rest = (rest + piece.data).split(b"\n")
        for ended in complete:
            line = ended.removesuffix(b"\r")
            if line.startswith(b"data:"):
                lines.append(line[5:].removeprefix(b" "))
            elif not line and lines:
                events.append(TimedEvent(piece.arrived_s, b"\n".join(lines)))
                lines = []
    return events
