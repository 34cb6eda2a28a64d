"""The client of the admin API: HTTP over TCP or a Unix socket, with nothing but the standard library."""

from __future__ import annotations

import http.client
import os
import re
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Self, TypeVar
from urllib.parse import quote

import msgspec
from msgspec import Struct

from machd.admin.errors import AdminErrorBody, AdminErrorDetail
from machd.errors import FaultError, MachdError, NoDaemonError, RequestError, UnavailableError
from machd.settings.texts import MAX_SOCKET_PATH_BYTES, is_loopback

_S = TypeVar("_S", bound=Struct)

_TIMEOUT_S = 30.0
"""For an answer: a reload builds the whole application anew, which takes seconds on a slow machine."""

_EVENTS_TIMEOUT_S = 600.0
"""For the next event or sign of life, which come every ``streaming.keepalive_s``."""


@dataclass(frozen=True, slots=True)
class AdminAddress:
    """The address of a daemon's admin API.

    Attributes:
        path: Of a Unix socket; None for TCP.
    """

    host: str = ""
    port: int = 0
    path: str | None = None

    @classmethod
    def of(cls, text: str) -> Self:
        """Read ``HOST:PORT``, the URL of it, or ``unix:PATH``.

        Raises:
            ValueError: It is none, or no loopback address: the token never leaves the machine.
        """
        if text.startswith("unix:") and text != "unix:":
            path = text.removeprefix("unix:")
            if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
                raise ValueError(f"has more than {MAX_SOCKET_PATH_BYTES} bytes in its path")
            return cls(path=path)
        host, _, port = text.removeprefix("http://").rstrip("/").rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if not host or not re.fullmatch("[0-9]{1,5}", port) or int(port) > 65_535:
            raise ValueError("is not HOST:PORT and not unix:PATH")
        if not is_loopback(host):
            raise ValueError("is no loopback address, and the admin API has no other")
        return cls(host, int(port))

    def __str__(self) -> str:
        """Return the address as it is typed."""
        if self.path is not None:
            return f"unix:{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class AdminClient:
    """Asks one daemon, a connection for each question."""

    def __init__(
        self, address: AdminAddress, token: str | None, *, timeout_s: float = _TIMEOUT_S
    ) -> None:
        """Prepare; ``token`` is None where the socket's permissions decide."""
        self.address = address
        self._timeout_s = timeout_s
        self._headers = {"Accept": "application/json"}
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token}"

    @property
    def page_url(self) -> str:
        """The address of the operators' page, with the token behind the ``#``, which a browser sends to nobody.

        Raises:
            NoDaemonError: It is a socket, which no browser opens.
        """
        if self.address.path is not None:
            raise NoDaemonError(
                f"no browser opens a socket, and the admin API listens on {self.address}; set admin.listen to "
                "127.0.0.1:8081, or let ssh -L 8081:SOCKET forward a port to it"
            )
        token = self._headers.get("Authorization", "").removeprefix("Bearer ")
        return f"http://{self.address}/#token={quote(token, safe='')}"

    def is_there(self) -> bool:
        """Return False only if nothing listens at the address; a program that may not be asked is there."""
        try:
            self._opened(self._timeout_s).close()
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:
            return True
        return True

    def knock(self) -> None:
        """Connect and ask nothing; NoDaemonError if nothing answers at the address."""
        self._connected(self._timeout_s).close()

    def ask(
        self,
        method: str,
        path: str,
        type_: type[_S],
        body: object = None,
        *,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> _S:
        """Send a request and read its answer.

        ``path`` includes its query, and ``body`` is sent as JSON. Without ``timeout_s`` the client's own holds.

        Raises:
            NoDaemonError: Nothing answers, it is no machd, or the token is not the right one.
            RequestError, UnavailableError, FaultError: The daemon refuses. UnavailableError also
                where it took the request and did not answer in time.
        """
        sent = dict(self._headers) | dict(headers or {})
        data = None
        if body is not None:
            data = msgspec.json.encode(body)
            sent["Content-Type"] = "application/json"
        connection = self._connected(timeout_s or self._timeout_s)
        try:
            connection.request(method, path, data, sent)
            answer = connection.getresponse()
            content = answer.read()
        except (OSError, http.client.HTTPException) as error:
            raise self._unanswered(error, is_change=method != "GET") from None
        finally:
            connection.close()
        return self._decoded(content, type_, answer.status)

    def events(self) -> Iterator[bytes]:
        """The JSON of every event, as it comes, until the daemon stops; errors are those of :meth:`ask`."""
        connection = self._connected(_EVENTS_TIMEOUT_S)
        try:
            connection.request("GET", "/admin/events", headers=self._headers)
            answer = connection.getresponse()
            if answer.status != http.client.OK:
                self._decoded(answer.read(), AdminErrorBody, answer.status)
            for line in answer:
                if line.startswith(b"data: "):
                    yield line.removeprefix(b"data: ").rstrip(b"\n")
        except (OSError, http.client.HTTPException) as error:
            raise self._unanswered(error, is_change=False) from None
        finally:
            connection.close()

    def _opened(self, timeout_s: float) -> http.client.HTTPConnection:
        """Connect; OSError if that fails."""
        address = self.address
        connection: http.client.HTTPConnection
        if address.path is not None:
            connection = _UnixConnection(address.path, timeout_s)
        else:
            connection = http.client.HTTPConnection(address.host, address.port, timeout=timeout_s)
        try:
            connection.connect()
        except OSError:
            connection.close()
            raise
        return connection

    def _connected(self, timeout_s: float) -> http.client.HTTPConnection:
        try:
            return self._opened(timeout_s)
        except OSError as error:
            reason = "it took too long" if isinstance(error, TimeoutError) else _reason(error)
            raise NoDaemonError(
                f"no daemon answers at {self.address}: {reason}; --address names another place"
            ) from None

    def _decoded(self, content: bytes, type_: type[_S], status: int) -> _S:
        try:
            if status == http.client.OK:
                return msgspec.json.decode(content, type=type_)
            detail = msgspec.json.decode(content, type=AdminErrorBody).error
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise NoDaemonError(
                f"what answers at {self.address} is not the admin API of machd"
            ) from None
        raise _refusal(status, detail)

    def _unanswered(self, error: Exception, *, is_change: bool) -> MachdError:
        """Return the error of a request that was taken and not answered.

        A daemon that is there and late is not missing: a script that gets exit code 69 might start a
        second. Nor is it known to have failed, which is 70. Whether the request has taken effect is
        not known: 1. A daemon that broke the connection off has
        gone, and that is 69.
        """
        unknown = (
            "; whether it has done what it was told is not known, machd ctl status shows it"
            if is_change
            else ""
        )
        if isinstance(error, TimeoutError):
            return UnavailableError(f"the daemon at {self.address} did not answer in time{unknown}")
        if not isinstance(error, OSError | http.client.IncompleteRead):
            return NoDaemonError(f"what answers at {self.address} is not the admin API of machd")
        return NoDaemonError(
            f"no daemon answers at {self.address} any more: {_reason(error)}{unknown}"
        )


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def _refusal(status: int, detail: AdminErrorDetail) -> MachdError:
    """The daemon's refusal as an error of this process, whose exit code says what kind it is."""
    problems = detail.problems if isinstance(detail.problems, list) else []
    text = "\n".join(problems or [detail.message])
    match status:
        case 401:
            return NoDaemonError("the daemon does not know this token; give --token-file")
        case 503 | 429:
            return UnavailableError(text)
        case _ if status >= 500:
            return FaultError(text)
        case _:
            return RequestError(text, param=detail.param)


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return type(error).__name__
