"""One endpoint as plain data, and the framework's handler that carries it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, TypeAlias

from litestar import HttpMethod, route
from litestar.handlers import HTTPRouteHandler

JSON = "application/json"
EVENTS = "text/event-stream"
JSON_LINES = "application/x-ndjson"

TEXT = "text/plain"

PUBLIC = "machd_public"
"""Option of handlers that answer without a key or token even where one is required."""

_ENDPOINT = "machd_endpoint"
_MACHDS_PATHS = ("/v1/capabilities", "/v1/cache/stats")
"""Paths that only machd has: no client of another server asks for them."""

Body: TypeAlias = Any
"""A type that msgspec encodes or decodes; None where none describes the body."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer that an endpoint can give.

    Attributes:
        body: The type on the wire; of a stream, the type of each event's data or of each line.
    """

    status: int
    body: Body
    media_type: str = JSON


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One method on one path, of the API or of the admin listener.

    Attributes:
        name: The operation's id, in snake case.
        route: Method and path, with ``{id}`` for a segment that the client fills in; ``GET|HEAD`` where HEAD
            is answered as GET, without the body.
        request: The body it takes; None without one.
        public: True if it answers without a key or token even where one is required.
    """

    name: str
    route: str
    summary: str
    answers: tuple[Answer, ...]
    request: Body = None
    public: bool = False

    @property
    def methods(self) -> list[str]:
        """HTTP methods in upper case, the described one first."""
        return self.route.split()[0].split("|")

    @property
    def method(self) -> str:
        """HTTP method in lower case, as OpenAPI writes it."""
        return self.methods[0].lower()

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
        """True if it generates, so that the answer tells how in its headers."""
        streams = any(answer.media_type in (EVENTS, JSON_LINES) for answer in self.answers)
        return streams and any(one.status == HTTPStatus.GATEWAY_TIMEOUT for one in self.answers)


def served(
    route_: str,
    answers: tuple[Answer, ...],
    *,
    takes: Body = None,
    public: bool = False,
    id_as: str = "",
    **options: Any,  # noqa: ANN401 - the framework's
) -> Callable[[Callable[..., Any]], HTTPRouteHandler]:
    """Make the framework's handler of a function: its name is the operation's, its docstring the summary.

    ``id_as`` is the function's parameter that gets ``{id}``, with the framework's type, such as ``id_:str``;
    ``options`` are those of the framework's handler.
    """

    def make(function: Callable[..., Any]) -> HTTPRouteHandler:
        summary = (function.__doc__ or "").splitlines()[0].removesuffix(".")
        endpoint = Endpoint(function.__name__, route_, summary, answers, takes, public)
        paths = [
            path.replace("{id}", f"{{{id_as}}}") for path in (endpoint.path, *endpoint.aliases)
        ]
        methods = [HttpMethod(method) for method in endpoint.methods]
        opt = {PUBLIC: public, _ENDPOINT: endpoint}
        return route(paths, http_method=methods, status_code=200, opt=opt, **options)(function)

    return make


def endpoint_of(handler: HTTPRouteHandler) -> Endpoint:
    """Return the endpoint that a handler serves."""
    endpoint = handler.opt[_ENDPOINT]
    assert isinstance(endpoint, Endpoint), "the handler was made by served"
    return endpoint
