"""One endpoint as plain data: its route, what it takes and every answer it can give."""

from __future__ import annotations

from dataclasses import dataclass
from http import HTTPStatus
from types import UnionType
from typing import Any

from msgspec import Struct

JSON = "application/json"
EVENTS = "text/event-stream"
JSON_LINES = "application/x-ndjson"
METRICS_TEXT = "text/plain"


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer that an endpoint can give.

    Attributes:
        body: The type on the wire, a union of types, or a list; None where none describes it. Of a
            stream, the type of each event's data or of each line.
    """

    status: int
    body: type[Struct] | type[list[Any]] | UnionType | None
    media_type: str = JSON


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One method on one path, of the API or of the admin listener.

    Attributes:
        name: The operation's id, in snake case.
        route: Method and path, with ``{parameter}`` for a segment that the client fills in.
        request: The body it takes, as msgspec decodes it; None without one.
        public: Whether it answers without a key or token even where one is required.
    """

    name: str
    route: str
    summary: str
    answers: tuple[Answer, ...]
    request: object | None = None
    public: bool = False

    @property
    def method(self) -> str:
        """HTTP method in lower case."""
        return self.route.split()[0].lower()

    @property
    def path(self) -> str:
        """Path of the route."""
        return self.route.split()[1]

    @property
    def aliases(self) -> tuple[str, ...]:
        """Other paths with the same handler, for clients whose base URL lacks ``/v1``."""
        has_alias = self.path.startswith("/v1/") and self.path not in _MACHDS_PATHS
        return (self.path.removeprefix("/v1"),) if has_alias else ()

    @property
    def generates(self) -> bool:
        """True if it runs the model, so that the answer tells how in its headers."""
        return any(answer.status == HTTPStatus.GATEWAY_TIMEOUT for answer in self.answers)


_MACHDS_PATHS = ("/v1/capabilities", "/v1/cache/stats")
"""Paths that only machd has: no client of another server asks for them."""
