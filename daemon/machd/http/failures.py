"""Failures of requests: every error becomes an answer in the envelope of the request's dialect.

Errors of machd's own tree know their status and code. The framework's are translated by status, never by
text. Anything else is a bug of machd's: the client gets a constant message, the log the traceback.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, TypeAlias

import structlog
from litestar import Request, Response
from litestar.exceptions import HTTPException
from litestar.types import ASGIApp, ExceptionHandlersMap, Message, Receive, Scope, Send

from machd.errors import (
    BodyTooLargeError,
    FaultError,
    InvalidRequestError,
    MachdError,
    MethodNotAllowedError,
    OperatorAbortError,
    OverloadedError,
    RequestTimeoutError,
    UnavailableError,
)
from machd.http.answering import connection_of
from machd.http.endpoint import Endpoint
from machd.http.leases import noted_model
from machd.http.stamps import envelope, request_id
from machd.panics import ENDINGS

OnRefusal: TypeAlias = Callable[[str, str | None], None]
"""Told the code of a refusal for want of room, and the model where it is known."""

ON_REFUSAL_KEY = "machd_on_refusal"
"""Where a request has what its application tells of refusals."""

_RESTART_S = 5
"""Retry-After of a server that is leaving or failing: about a restart."""


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
    """Return an answer that needs nothing of the framework."""

    async def respond(scope: Scope, _receive: Receive, send: Send) -> None:
        body = envelope(scope).encode(error, request_id(scope))
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            *(
                (name.lower().encode(), value.encode())
                for name, value in error_headers(error).items()
            ),
        ]
        status = envelope(scope).status(error)
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": False})

    return respond


def error_answer(request: Request[Any, Any, Any], error: MachdError) -> Response[bytes]:
    """Return an error as a handler may return it, which counts it nowhere."""
    shape = envelope(request.scope)
    return Response(
        shape.encode(error, request_id(request.scope)),
        status_code=shape.status(error),
        media_type="application/json",
        headers=error_headers(error),
    )


def always_answered(app: ASGIApp) -> ASGIApp:
    """Wrap an application so that every exception that escapes it is logged and answered in the envelope.

    The framework's handlers see Exceptions only, and the server's own answer is plain text. A response
    that has begun cannot be replaced: its connection is cut, so that the client sees a broken answer
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
    """Log an error that no handler knows; returns what the client may know of it."""
    structlog.get_logger("machd.http").error("request.failed", exc_info=error)
    if isinstance(error, MemoryError):
        return OverloadedError(
            "the server has too little memory left for this request; try again later"
        )
    return FaultError("the server failed to answer this request")


def noted(request: Request[Any, Any, Any], error: BaseException) -> MachdError:
    """Log and count an error that comes after the response has started, as the handlers do one that comes before.

    Returns:
        What the client may know of it.
    """
    known = error if isinstance(error, MachdError) else unexpected(error)
    request.app.exception_handlers[MachdError](request, known)
    return known


@dataclass(frozen=True, slots=True)
class Failures:
    """Exception handlers of one application.

    Attributes:
        endpoints: Every method on every path that it serves.
        too_long: Message for a body that the framework refuses for its length, by path.
    """

    endpoints: Iterable[Endpoint]
    too_long: Callable[[str], str]

    @property
    def handlers(self) -> ExceptionHandlersMap:
        """The handlers by the exception that they take."""
        return {
            MachdError: self._on_machd_error,
            HTTPException: self._on_http_error,
            Exception: lambda request, error: error_answer(request, unexpected(error)),
        }

    def _on_machd_error(
        self, request: Request[Any, Any, Any], error: MachdError
    ) -> Response[bytes]:
        if isinstance(error, UnavailableError):
            # Refusals come before a response has started: by here, or by the gate.
            on_refusal: OnRefusal | None = request.scope["state"].get(ON_REFUSAL_KEY)
            if on_refusal is not None:
                on_refusal(error.code, noted_model(request.scope))
        return error_answer(request, error)

    def _on_http_error(
        self, request: Request[Any, Any, Any], error: HTTPException
    ) -> Response[bytes]:
        path = request.url.path
        match error.status_code:
            case 405 if allowed := self._allowed_methods(path):
                refusal = MethodNotAllowedError("this path does not take this method")
                response = error_answer(request, refusal)
                response.set_header("Allow", allowed)
                return response
            case 404 | 405:  # the second where web sockets alone are served
                return error_answer(request, envelope(request.scope).not_found(path))
            case 413:
                return error_answer(request, BodyTooLargeError(self.too_long(path)))
            case status if status < HTTPStatus.INTERNAL_SERVER_ERROR:
                return error_answer(
                    request,
                    InvalidRequestError("the request is not one that this server understands"),
                )
            case _:
                return error_answer(request, unexpected(error))

    def _allowed_methods(self, path: str) -> str:
        matching = [
            one for one in self.endpoints if re.fullmatch(one.path.replace("{id}", ".+"), path)
        ]
        return ", ".join(sorted({method for one in matching for method in one.methods}))
