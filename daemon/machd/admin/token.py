"""The admin token: a file of the operator's, of the service manager's, or of the daemon's own.

``machd ctl`` looks where the daemon looks, so nothing has to be told to it on the same machine.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
import secrets
import socket
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

from machd.errors import AuthenticationError, SettingsError
from machd.http.secret_files import credential_path, read_secret
from machd.http.sockets import Listener
from machd.own_files import OwnFile
from machd.regular_files import RegularFile
from machd.settings.model import Settings
from machd.user_directories import user_cache_directory

TOKEN_KEY = "machd_admin_token"  # noqa: S105 - a name
"""Where a request has the token that its listener takes."""

_SETTING = "auth.admin_token_file"
_CREDENTIAL = "admin-token"
_MIN_TOKEN_CHARACTERS = 16
_TOKEN_BYTES = 32
_MAX_FILE_BYTES = 4096
_DEFAULT_HOST = "127.0.0.1"
_SERVICE_DIRECTORY = Path("/run/machd")
"""RuntimeDirectory of the systemd unit, for a client that systemd tells nothing."""

_OTHERS_READ = stat.S_IRWXG | stat.S_IRWXO
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def read_token(path: Path, *, key: str = _SETTING) -> str:
    """The token in a file.

    Raises:
        SettingsError: It cannot be read, is empty or too short. No token is ever quoted.
    """
    return _token(read_secret(path, key=key, max_bytes=_MAX_FILE_BYTES), path, key)


def read_hidden_token(path: Path) -> str:
    """Read the token in the operator's file, which must be readable by its owner alone.

    Raises:
        SettingsError: As for :func:`read_token`; or its mode lets others read it.
    """
    file = read_secret(path, key=_SETTING, max_bytes=_MAX_FILE_BYTES)
    if file.mode & _OTHERS_READ:
        raise SettingsError([f"{_SETTING}: others can read {path}; run chmod 600 on it"])
    return _token(file, path, _SETTING)


def token_credential(environ: Mapping[str, str]) -> Path | None:
    """Return the service manager's credential; None where there is none."""
    return credential_path(environ, _CREDENTIAL, key=_SETTING)


def token_paths(environ: Mapping[str, str], host: str, port: int) -> Iterator[Path]:
    """List places at which a daemon at that address may have left its own token, the likeliest first."""
    places = [_own_directory(environ), _user_directory(environ), _SERVICE_DIRECTORY]
    for directory in dict.fromkeys(places):
        for address in _addresses(host, port):
            yield directory / _file_name(address, port)


def write_new_token(environ: Mapping[str, str], host: str, port: int) -> tuple[str, Path]:
    """Make a token for the address that the daemon has; only its user can read the file.

    Raises:
        SettingsError: The directory is another user's, or others can write to it.
    """
    directory = _own_directory(environ)
    path = directory / _file_name(host, port)
    token = secrets.token_urlsafe(_TOKEN_BYTES)
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_owner(directory)
        path.unlink(missing_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(f"{token}\n")
    except OSError as error:
        problem = f"admin.listen: cannot write a new token to {path}: {error.strerror}"
        raise SettingsError([f"{problem}; set auth.admin_token_file"]) from None
    return token, path


def _check_owner(directory: Path) -> None:
    """Raise SettingsError for a link, a directory of another user, or one that others can write to."""
    facts = directory.lstat()
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.geteuid():
        problem = "is no directory of the user that runs machd"
    elif facts.st_mode & _OTHERS_WRITE:
        problem = "can be written by others; run chmod 700 on it"
    else:
        return
    raise SettingsError([f"admin.listen: the token would lie in {directory}, which {problem}"])


def _own_directory(environ: Mapping[str, str]) -> Path:
    """Return the place of this process's own token: the service manager's directory or else the user's."""
    # A unit may have several, with a colon between them.
    runtime = environ.get("RUNTIME_DIRECTORY", "").partition(":")[0]
    return Path(runtime) if runtime else _user_directory(environ)


def _user_directory(environ: Mapping[str, str]) -> Path:
    runtime = environ.get("XDG_RUNTIME_DIR", "")
    if runtime and Path(runtime).is_absolute():
        return Path(runtime, "machd")
    return user_cache_directory(environ) / "machd" / "run"


def _addresses(host: str, port: int) -> Iterator[str]:
    """Yield the addresses of a daemon that is told to listen on ``host``."""
    try:
        yield ipaddress.ip_address(host).compressed
    except ValueError:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        yield from (str(address[0]) for *_, address in found)


def _file_name(host: str, port: int) -> str:
    """A name of its own for each address, as several can have the same port."""
    return f"admin-{port}.token" if host == _DEFAULT_HOST else f"admin-{host}-{port}.token"


def _token(file: RegularFile, path: Path, key: str) -> str:
    try:
        token = file.content.decode("ascii").strip()
    except UnicodeDecodeError:
        raise SettingsError([f"{key}: cannot read {path}: not ASCII"]) from None
    if not token:
        raise SettingsError([f"{key}: {path} is empty"])
    if len(token) < _MIN_TOKEN_CHARACTERS or not token.isprintable():
        raise SettingsError(
            [
                f"{key}: {path} does not hold one token of at least {_MIN_TOKEN_CHARACTERS} characters"
            ]
        )
    return token


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
        credential = token_credential(environ)
        if credential is not None:
            # Its readers are the service manager's choice.
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
        """The file of a token that was made at start; None for one that the operator keeps."""
        return None if self._own_file is None else self._own_file.path

    def check(self, authorization: str | None) -> None:
        """Let a request in; AuthenticationError without a token, or with another one."""
        if self._digest is not None and not self.is_in(authorization):
            raise AuthenticationError("send the admin token as Authorization: Bearer TOKEN")

    def is_in(self, authorization: str | None) -> bool:
        """Return True if a header holds the token; never where the socket's permissions decide."""
        if self._digest is None:
            return False
        scheme, _, given = (authorization or "").partition(" ")
        given = given if scheme.lower() == "bearer" else ""
        # Compared in constant time, also where there is nothing to compare.
        return hmac.compare_digest(self._digest, _digest(given))

    def close(self) -> None:
        """Remove the file of a token that is not needed any more; the token itself still counts."""
        if self._own_file is not None:
            self._own_file.remove()
            self._own_file = None


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
