"""Repeated warnings and errors: one line a second of each kind, with the number of those left out.

Whatever a client can provoke, it can provoke thousands of times a second; the log must not fill the disk.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Hashable, Mapping

from machd.clock import Clock

_INTERVAL_S = 1.0
_MAX_KINDS = 1024


class RepeatFilter(logging.Filter):
    """Passes one record of a kind a second, with ``repeats`` on the next one that passes.

    A kind is a logger, a level, an event or message template, and an exception's type. Records below
    WARNING all pass. Filters run outside the handler's lock, on every thread that logs.
    """

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock
        self._lock = threading.Lock()
        self._passed: dict[Hashable, tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the record is written; ``record.repeats`` counts those that were not since the last."""
        if record.levelno < logging.WARNING:
            return True
        kind = _kind(record)
        now_s = self._clock.monotonic_s()
        with self._lock:
            passed_s, repeats = self._passed.get(kind, (None, 0))
            if passed_s is not None and now_s - passed_s < _INTERVAL_S:
                self._passed[kind] = passed_s, repeats + 1
                return False
            self._passed.pop(kind, None)  # the order of the kinds is that of their last lines
            if len(self._passed) >= _MAX_KINDS:
                del self._passed[next(iter(self._passed))]
            self._passed[kind] = now_s, 0
        record.repeats = repeats
        return True


def _kind(record: logging.LogRecord) -> Hashable:
    event, exc_info = record.msg, record.exc_info
    if isinstance(event, Mapping):  # structlog's: the event with its fields
        fields = event
        event, exc_info = fields.get("event"), fields.get("exc_info")
    # asyncio writes what differs each time, such as a task's name, from the second line on.
    first_line = str(event).partition("\n")[0]
    return record.name, record.levelno, first_line, _exception_type(exc_info)


def _exception_type(exc_info: object) -> type[BaseException] | None:
    """Return the type of an ``exc_info`` of structlog or logging: an exception, a triple, or True."""
    if isinstance(exc_info, BaseException):
        return type(exc_info)
    if isinstance(exc_info, tuple):
        return exc_info[0] if exc_info else None
    return sys.exc_info()[0] if exc_info else None
