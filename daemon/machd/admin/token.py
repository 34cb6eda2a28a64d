"""Who may use the admin API: whoever has the token, or may open the Unix socket."""

from __future__ import annotations

import hashlib
import hmac
import socket
from collections.abc import Mapping
from pathlib import Path

from machd.admin.token_file import (
    credential_path,
    read_hidden_token,
    read_token,
    write_new_token,
)
from machd.errors import AuthenticationError, SettingsError
from machd.http.own_files import OwnFile
from machd.http.sockets import Listener
from machd.settings.model import Settings

_OPEN_SOCKET = (
    "admin.listen: every user of this machine can open the socket; set auth.admin_token_file, or "
    "the socket's mode to 0600"
)


class AdminToken:
    """The digest of the token; none where the socket's permissions decide."""

    def __init__(self, digest: bytes | None, *, own_file: OwnFile | None = None) -> None:
        """Keep the digest alone; ``own_file`` is removed by :meth:`close`."""
        self._digest = digest
        self._own_file = own_file

    @classmethod
    def of(cls, settings: Settings, environ: Mapping[str, str], listener: Listener) -> AdminToken:
        """The token that the settings or the service manager name, or a new one.

        Raises:
            SettingsError: The file is wrong, or others could get at the API without a token.
        """
        if settings.auth.admin_token_file is not None:
            return cls(_digest(read_hidden_token(Path(settings.auth.admin_token_file))))
        credential = credential_path(environ)
        if credential is not None:
            # Who may read it is the service manager's doing.
            return cls(_digest(read_token(credential)))
        if listener.socket.family == socket.AF_UNIX:
            if listener.is_open_to_all_users:
                raise SettingsError([_OPEN_SOCKET])
            return cls(None)
        host, port = listener.socket.getsockname()[:2]
        token, path = write_new_token(environ, host, port)
        return cls(_digest(token), own_file=OwnFile(path))

    @property
    def own_file(self) -> Path | None:
        """The file of a token that was made at start; None for one that somebody else keeps."""
        return None if self._own_file is None else self._own_file.path

    def check(self, authorization: str | None) -> None:
        """Let a request in, or say why not.

        Raises:
            AuthenticationError: There is no token, or another one.
        """
        if self._digest is None:
            return
        scheme, _, given = (authorization or "").partition(" ")
        given = given if scheme.lower() == "bearer" else ""
        # Compared in constant time, also where there is nothing to compare.
        if not hmac.compare_digest(self._digest, _digest(given)):
            raise AuthenticationError("send the admin token as Authorization: Bearer TOKEN")

    def close(self) -> None:
        """Remove the file of a token that nobody needs any more; the token itself still counts."""
        if self._own_file is not None:
            self._own_file.remove()
            self._own_file = None


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
