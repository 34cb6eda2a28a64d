"""Sockets opened and handed over by the service manager: sd_listen_fds(3).

Such a socket outlives the daemon: a client that connects while it restarts waits for the next one.
"""

from __future__ import annotations

import os
import re
import socket
import stat
from collections.abc import Mapping, Sequence

from machd.errors import ListenError

PUBLIC = "public"
ADMIN = "admin"

_FIRST_FD = 3
"""SD_LISTEN_FDS_START of sd_listen_fds(3)."""

_FAMILIES = {socket.AF_INET, socket.AF_INET6, socket.AF_UNIX}


def inherited_socket(name: str, environ: Mapping[str, str]) -> socket.socket | None:
    """The socket handed over under ``name``; None where there is none.

    A single one is the public one unless its name is ``admin``. It is no longer inherited by
    whatever this process starts.

    Raises:
        ListenError: The sockets cannot be told apart, or this one cannot be listened on.
    """
    names = _names(environ)
    if name not in names:
        return None
    descriptor = _FIRST_FD + names.index(name)
    try:
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            raise ListenError(f"{_what(name)} is no socket; hand over one made by a .socket unit")
        inherited = socket.socket(fileno=descriptor)
    except OSError as error:
        raise ListenError(
            f"{_what(name)} is not there ({error.strerror}); LISTEN_FDS says that it is"
        ) from None
    try:
        _refuse_unless_listening(inherited, name)
    except ListenError:
        inherited.detach()  # its opener may still want it
        raise
    inherited.set_inheritable(False)
    return inherited


def _names(environ: Mapping[str, str]) -> Sequence[str]:
    """Name the listener of each descriptor, in their order; none where they are for another process."""
    count_text = environ.get("LISTEN_FDS", "")
    if environ.get("LISTEN_PID") != str(os.getpid()) or not count_text:
        return ()
    if not re.fullmatch("[0-9]{1,6}", count_text):
        raise ListenError("LISTEN_FDS is no number; it is set by the service manager")
    count, text = int(count_text), environ.get("LISTEN_FDNAMES", "")
    names = text.split(":") if text else []
    if count == 1:
        return (ADMIN,) if names == [ADMIN] else (PUBLIC,)
    if len(names) != count or len(set(names)) != count or not set(names) <= {PUBLIC, ADMIN}:
        raise ListenError(
            f"the service manager hands over {count} sockets and machd takes one named {PUBLIC} "
            f"and one named {ADMIN}; set FileDescriptorName= in their .socket units, one "
            "ListenStream= in each"
        )
    return names


def _refuse_unless_listening(inherited: socket.socket, name: str) -> None:
    if inherited.family not in _FAMILIES or inherited.type != socket.SOCK_STREAM:
        raise ListenError(f"{_what(name)} is no stream socket; open it with ListenStream=")
    if not inherited.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        raise ListenError(f"{_what(name)} does not listen; its .socket unit needs Accept=no")


def _what(name: str) -> str:
    return f"the socket handed over for the {name} address"
