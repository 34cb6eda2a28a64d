"""The connection that an answer goes over, as whatever answers knows it."""

from __future__ import annotations

from typing import Protocol

from litestar.types import Scope

_CONNECTION_KEY = "machd_connection"


class AnsweringConnection(Protocol):
    """A connection that a request came over, or what stands for one."""

    def check_stalled(self) -> None:
        """Raise ClientStalledError if the connection was closed because its client read nothing."""
        ...

    def abort(self) -> None:
        """Cut the answer short, so that the client sees that it is broken."""
        ...


def note_connection(scope: Scope, connection: AnsweringConnection) -> None:
    """Note which connection a request came over."""
    scope["state"][_CONNECTION_KEY] = connection


def connection_of(scope: Scope) -> AnsweringConnection:
    """The connection that a request came over."""
    connection: AnsweringConnection = scope["state"][_CONNECTION_KEY]
    return connection
