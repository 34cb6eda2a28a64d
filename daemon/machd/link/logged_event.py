"""One line of the log as data."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct


class LoggedEvent(Struct, frozen=True, kw_only=True):
    """One event of the log, of the front or of an engine process.

    Attributes:
        timestamp: When it was logged, in RFC 3339.
        level: ``debug``, ``info``, ``warning``, ``error`` or ``critical``.
        event: What happened, such as ``request.finished``, or a library's message.
        model: The model that it is about; null where it is about none.
        fields: What else the line has, as text.
    """

    timestamp: str
    level: str
    logger: str
    event: str
    model: str | None
    fields: Mapping[str, str]
