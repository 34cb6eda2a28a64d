"""The last events of the log, kept as they were logged: those of this process, and those that engine processes tell of."""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from structlog.processors import ExceptionRenderer
from structlog.typing import EventDict

from machd.link.logged_event import LoggedEvent

MAX_EVENTS = 500
"""Events that are kept."""

_MAX_VALUE_CHARACTERS = 4096
"""Longest text of a field; of a longer one the end is kept, where a traceback says what was wrong."""

_ENVELOPE = frozenset(
    {"event", "level", "logger", "timestamp", "model", "_record", "_from_structlog"}
)

_LEVELS = ("debug", "info", "warning", "error", "critical")

OnEvent = Callable[[LoggedEvent], None]


class LogRing:
    """The last events. Any thread may add and read."""

    def __init__(self) -> None:
        """Begin with none."""
        self._lock = threading.Lock()
        self._events: deque[LoggedEvent] = deque(maxlen=MAX_EVENTS)
        self._count = 0
        self._on_event: Callable[[], None] | None = None

    @property
    def count(self) -> int:
        """Events since the start."""
        return self._count

    def add(self, event: LoggedEvent) -> None:
        """Keep an event, at the cost of the oldest where there is no room."""
        with self._lock:
            self._events.append(event)
            self._count += 1
            on_event = self._on_event
        if on_event is not None:
            on_event()

    def newest(self, level: str = "debug", *, since: int = 0) -> tuple[list[LoggedEvent], int]:
        """Return the kept events from a level on, the oldest first, and :attr:`count`.

        Args:
            level: The lowest that is returned.
            since: An earlier count: only what was added after it.
        """
        with self._lock:
            new = self._count - since
            events = list(self._events)[-new:] if new > 0 else []
            count = self._count
        return [one for one in events if is_at_least(one.level, level)], count

    def watch(self, on_event: Callable[[], None] | None) -> None:
        """Have ``on_event`` called after each event, on whatever thread logs; None for no longer."""
        with self._lock:
            self._on_event = on_event


class EventKeeper:
    """A processor that hands each line of the log to a receiver and returns it unchanged. It is the last before those that render."""

    def __init__(self, on_event: OnEvent) -> None:
        self._on_event = on_event
        self._format_exception = ExceptionRenderer()

    def __call__(self, logger: object, method: str, event: EventDict) -> EventDict:
        """Hand it on; nothing that this raises may keep the line from being written."""
        self._on_event(self._logged(logger, method, dict(event)))
        return event

    def _logged(self, logger: object, method: str, event: dict[str, Any]) -> LoggedEvent:
        created_unix_s = event["_record"].created
        event = dict(self._format_exception(logger, method, event))
        model = event.get("model")
        return LoggedEvent(
            timestamp=datetime.fromtimestamp(created_unix_s, UTC).isoformat(
                timespec="milliseconds"
            ),
            level=str(event.get("level", "info")),
            logger=str(event.get("logger", "")),
            event=_text(event.get("event", "")),
            model=None if model is None else str(model),
            fields=_fields(event),
        )


def is_at_least(level: str, lowest: str) -> bool:
    """Return True if a level is one from ``lowest`` on; one that is not known is."""
    if level not in _LEVELS:
        return True
    return _LEVELS.index(level) >= _LEVELS.index(lowest)


def _fields(event: Mapping[str, Any]) -> dict[str, str]:
    return {
        name: _text(value)
        for name, value in event.items()
        if name not in _ENVELOPE and value is not None
    }


def _text(value: object) -> str:
    """Return a value as the log's JSON has it, without the quotes of a text."""
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text[-_MAX_VALUE_CHARACTERS:]
