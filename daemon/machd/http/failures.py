"""Every way to fail, in the envelope that the path's clients read.

That is Anthropic's below ``/v1/messages``, with or without ``/v1``, and where a list of models is asked
for with ``anthropic-version``; Ollama's below ``/api``; OpenAI's everywhere else. Errors of our own tree
know their status and code. The framework's are translated by status, never by text. Anything else
is our bug: the client gets a constant message, the log the traceback.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import Any, Protocol

import msgspec
import structlog
from litestar import Request, Response
from litestar.exceptions import HTTPException
from litestar.types import ASGIApp, ExceptionHandlersMap, Message, Receive, Scope, Send

from machd.dialects.anthropic.errors import anthropic_error_body
from machd.dialects.endpoints import PUBLIC_ROUTES
from machd.dialects.ollama.errors import ollama_error_body, ollama_not_found
from machd.dialects.wire.errors import error_body
from machd.errors import (
    BodyTooLargeError,
    FaultError,
    InvalidRequestError,
    MachdError,
    MethodNotAllowedError,
    NotFoundError,
    OperatorAbortError,
    OverloadedError,
    RequestError,
    RequestTimeoutError,
    UnavailableError,
)
from machd.http.connection import connection_of
from machd.http.stamps import request_id
from machd.panics import ENDINGS

_VERSION_PREFIX = re.compile(r"^(?:/v1)+(?=/|$)")
_DOUBLED_PREFIX = re.compile(r"/v1/v1(?=/|$)")
_ANTHROPIC_HEADER = b"anthropic-version"
_OLLAMA_PATH = "/api"

_RESTART_S = 5
"""What a client is told to wait for a server that is leaving or failing: about a restart."""


def _not_found(scope: Scope) -> NotFoundError:
    path = scope["path"]
    if speaks_ollama(scope):
        return ollama_not_found(path)
    if _DOUBLED_PREFIX.match(path):
        return NotFoundError(
            "the path begins with /v1 twice: the base URL ends in /v1, and the client adds its own; "
            "write the base URL without it, such as http://127.0.0.1:8080"
        )
    return NotFoundError("nothing is served at this path")


_HTTP_ERRORS: dict[int, Callable[[Scope], RequestError]] = {
    404: _not_found,
    405: lambda _: MethodNotAllowedError("this path does not take this method"),
    413: lambda _: BodyTooLargeError("the body is longer than limits.max_body_bytes"),
}


_HEAD_PATHS = frozenset(
    {"/", "/v1/models", "/models", "/health", "/health/live", "/health/ready", "/metrics"}
)
"""Where HEAD is answered as GET, without the body: load balancers ask like that."""


class HasPath(Protocol):
    """An endpoint of whichever table."""

    @property
    def method(self) -> str:
        """In lower case."""
        ...

    @property
    def path(self) -> str:
        """With ``{parameter}`` for a segment that the client fills in."""
        ...


def error_json(error: MachdError) -> bytes:
    """OpenAI's envelope of an error, as JSON."""
    return msgspec.json.encode(error_body(error))


def anthropic_error_json(error: MachdError, *, request_id: str) -> bytes:
    """Anthropic's envelope of an error, as JSON."""
    return msgspec.json.encode(anthropic_error_body(error, request_id=request_id))


def ollama_error_json(error: MachdError) -> bytes:
    """Ollama's envelope of an error, as JSON."""
    return msgspec.json.encode(ollama_error_body(error))


def speaks_anthropic(scope: Scope) -> bool:
    """Whether a request's client reads Anthropic's shapes."""
    # With /v1 once, not at all, or twice by mistake.
    path = _VERSION_PREFIX.sub("", scope["path"])
    if _is_at_or_below(path, "/messages"):
        return True
    return _is_at_or_below(path, "/models") and any(
        name == _ANTHROPIC_HEADER for name, _ in scope["headers"]
    )


def speaks_ollama(scope: Scope) -> bool:
    """Whether clients of this path expect Ollama's envelope."""
    return _is_at_or_below(scope["path"], _OLLAMA_PATH)


def error_headers(error: MachdError) -> dict[str, str]:
    """Headers that go with an error."""
    if isinstance(error, UnavailableError):
        return {"Retry-After": str(error.retry_after_s)}
    if isinstance(error, RequestTimeoutError | OperatorAbortError):
        # The official clients would ask again, twice, for what has just taken too long, or for what
        # an operator has just ended.
        return {"X-Should-Retry": "false"}
    if error.http_status == HTTPStatus.SERVICE_UNAVAILABLE:
        return {"Retry-After": str(_RESTART_S)}
    return {}


def error_response(error: MachdError) -> ASGIApp:
    """An answer that needs nothing of the framework."""

    async def respond(scope: Scope, _receive: Receive, send: Send) -> None:
        body = _envelope(scope, error)
        own_headers = error_headers(error).items()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            *((name.lower().encode(), value.encode()) for name, value in own_headers),
        ]
        await send({"type": "http.response.start", "status": error.http_status, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": False})

    return respond


def always_answered(app: ASGIApp) -> ASGIApp:
    """Wrap an application so that whatever escapes it is logged and answered in the envelope.

    The framework's handlers see Exceptions only, and the server's own answer is plain text. A response
    that has begun cannot be taken back: its connection is cut, so that the client sees a broken answer
    and no short one.
    """

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        has_started = False

        async def send_noted(message: Message) -> None:
            nonlocal has_started
            has_started = True
            await send(message)

        try:
            await app(scope, receive, send_noted)
        except ENDINGS:
            raise
        except BaseException as error:  # noqa: BLE001 - the outermost handler
            fault = unexpected(error)
            if has_started:
                connection_of(scope).abort()
            else:
                await error_response(fault)(scope, receive, send)

    return answer


def unexpected(error: BaseException) -> MachdError:
    """Log what no handler knows and give what the client may know of it."""
    structlog.get_logger("machd.http").error("request.failed", exc_info=error)
    if isinstance(error, MemoryError):
        return OverloadedError(
            "the server has too little memory left for this request; try again later"
        )
    return FaultError("the server failed to answer this request")


def allowed_methods(path: str, endpoints: Iterable[HasPath]) -> str:
    """What a path takes, for the Allow header that goes with 405."""
    methods = {
        endpoint.method.upper()
        for endpoint in endpoints
        if re.fullmatch(re.sub(r"\{\w+\}", ".+", endpoint.path), path)
    }
    if path in _HEAD_PATHS and "GET" in methods:
        methods.add("HEAD")
    return ", ".join(sorted(methods))


def _is_at_or_below(path: str, parent: str) -> bool:
    return path == parent or path.startswith(f"{parent}/")


def _envelope(scope: Scope, error: MachdError) -> bytes:
    if speaks_anthropic(scope):
        return anthropic_error_json(error, request_id=request_id(scope))
    if speaks_ollama(scope):
        return ollama_error_json(error)
    return error_json(error)


def error_answer(request: Request[Any, Any, Any], error: MachdError) -> Response[bytes]:
    """An error as a handler may return it, which counts it nowhere."""
    return Response(
        _envelope(request.scope, error),
        status_code=error.http_status,
        media_type="application/json",
        headers=error_headers(error),
    )


def _on_machd_error(request: Request[Any, Any, Any], error: MachdError) -> Response[bytes]:
    if isinstance(error, UnavailableError):
        # Whoever refuses does so before a response has started: refusals come by here, or by the gate.
        request.app.state.metrics.count_rejection(error.code)
    return error_answer(request, error)


def _on_http_error(request: Request[Any, Any, Any], error: HTTPException) -> Response[bytes]:
    make = _HTTP_ERRORS.get(error.status_code)
    if make is not None:
        response = error_answer(request, make(request.scope))
        if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
            response.set_header("Allow", allowed_methods(request.url.path, PUBLIC_ROUTES))
        return response
    if error.status_code < 500:
        return error_answer(
            request, InvalidRequestError("the request is not one that this server understands")
        )
    return error_answer(request, unexpected(error))


def _on_exception(request: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
    return error_answer(request, unexpected(error))


EXCEPTION_HANDLERS: ExceptionHandlersMap = {
    MachdError: _on_machd_error,
    HTTPException: _on_http_error,
    Exception: _on_exception,
}
