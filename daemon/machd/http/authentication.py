"""API keys: one authenticator for both header forms, on every route that is not marked public."""

from __future__ import annotations

import hashlib
import hmac
import re
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import structlog
from litestar.connection import ASGIConnection
from litestar.handlers import BaseRouteHandler
from litestar.types import Scope

from machd.errors import AuthenticationError, OperatorRequiredError, SettingsError
from machd.http.endpoint import PUBLIC
from machd.http.secret_files import credential_path, read_secret
from machd.settings.model import Settings

ANONYMOUS = "anonymous"
"""The client's name where no keys are configured."""

OPERATOR = "admin:token"
"""The client's name of a request with the admin token; no name in a key file has a colon."""

HoldsToken: TypeAlias = Callable[[str | None], bool]
"""Whether an ``Authorization`` header holds the admin token."""

ACCESS_KEY = "machd_access"
"""Where a request has the :class:`Access` of its application."""

_CLIENT_KEY = "machd_client"
_OPERATOR_KEY = "machd_is_operator"
_SETTING = "auth.api_keys_file"
_CREDENTIAL = "api-keys"
_MAX_FILE_BYTES = 1_048_576
_MIN_KEY_CHARACTERS = 16
_KEY = re.compile(rf"[\x21-\x7e]{{{_MIN_KEY_CHARACTERS},}}")
"""Characters that a header carries unchanged."""


class ApiKeys:
    """Names and the SHA-256 digests of their keys; the keys themselves are not kept."""

    def __init__(self, digests: dict[str, bytes]) -> None:
        """Take over keys; without any, every client has access."""
        self._digests = digests

    @classmethod
    def none(cls) -> ApiKeys:
        """No keys: everyone is anonymous."""
        return cls({})

    @classmethod
    def read(cls, path: Path) -> ApiKeys:
        """Read ``name:key`` lines; empty lines and lines that begin with ``#`` are skipped.

        Raises:
            SettingsError: The file cannot be read, or a line is wrong. No key is ever quoted.
        """
        file = read_secret(path, key=_SETTING, max_bytes=_MAX_FILE_BYTES)
        try:
            lines = file.content.decode("utf-8").split("\n")
        except UnicodeDecodeError:
            raise SettingsError([f"{_SETTING}: cannot read {path}: not UTF-8"]) from None
        digests, problems = _parse(lines)
        if problems:
            raise SettingsError([f"{_SETTING}: {path}: {one}" for one in problems])
        if file.mode & stat.S_IROTH:
            # No error: a file mounted into a container is often readable by all of its few processes.
            structlog.get_logger("machd.http").warning(
                "api_keys.exposed",
                path=str(path),
                mode=f"{file.mode:04o}",
                advice="let only the daemon's user read it: chmod o-rwx, or a systemd credential",
            )
        return cls(digests)

    @classmethod
    def of(cls, settings: Settings, environ: Mapping[str, str]) -> ApiKeys:
        """The keys that the settings name, or else those of the service manager.

        Raises:
            SettingsError: The file is wrong.
        """
        if settings.auth.api_keys_file is not None:
            return cls.read(Path(settings.auth.api_keys_file))
        credential = credential_path(environ, _CREDENTIAL, key=_SETTING)
        return cls.none() if credential is None else cls.read(credential)

    @property
    def is_required(self) -> bool:
        """True if requests need a key."""
        return bool(self._digests)

    @property
    def names(self) -> frozenset[str]:
        """Names of all keys."""
        return frozenset(self._digests)

    def authenticate(self, authorizations: Sequence[str], x_api_keys: Sequence[str]) -> str:
        """The name behind a request's key.

        Schemes of ``Authorization`` other than Bearer are no key.

        Raises:
            AuthenticationError: There is no key, it is unknown, or two differ.
        """
        if not self._digests:
            return ANONYMOUS
        bearers = [
            key
            for scheme, _, key in (one.partition(" ") for one in authorizations)
            if scheme.lower() == "bearer"
        ]
        given = {key for key in (*bearers, *x_api_keys) if key}
        if len(given) != 1:
            raise AuthenticationError(
                "send one API key, as Authorization: Bearer KEY or as X-Api-Key"
            )
        digest = _digest(given.pop())
        # All keys are compared in constant time, so that latency reveals nothing.
        names = [
            name for name, known in self._digests.items() if hmac.compare_digest(known, digest)
        ]
        if not names:
            raise AuthenticationError("the API key is not known to this server")
        return names[0]


@dataclass(frozen=True, slots=True)
class Access:
    """The keys that an application takes.

    Attributes:
        api_keys: Of clients.
        holds_admin_token: Tells operators, where they may ask.
    """

    api_keys: ApiKeys
    holds_admin_token: HoldsToken


def _access(connection: ASGIConnection[Any, Any, Any, Any]) -> Access:
    access = connection.scope["state"][ACCESS_KEY]
    assert isinstance(access, Access), "the gate writes nothing else"
    return access


async def require_api_key(  # async so that the framework calls it here and not on a thread
    connection: ASGIConnection[Any, Any, Any, Any], handler: BaseRouteHandler
) -> None:
    """Guard of every route: names the client; AuthenticationError where a key is needed and none is good."""
    if handler.opt.get(PUBLIC):
        return
    keys, holds_token = _access(connection).api_keys, _access(connection).holds_admin_token
    state = connection.scope["state"]
    state[_OPERATOR_KEY] = not keys.is_required
    if keys.is_required and holds_token(connection.headers.get("authorization")):
        state[_CLIENT_KEY], state[_OPERATOR_KEY] = OPERATOR, True
        return
    state[_CLIENT_KEY] = keys.authenticate(
        connection.headers.getall("authorization", []), connection.headers.getall("x-api-key", [])
    )


def authorization_for(
    connection: ASGIConnection[Any, Any, Any, Any], keys: Iterable[str]
) -> str | None:
    """Return the ``Authorization`` header with the first key or token that is good; None where none is needed.

    Raises:
        AuthenticationError: One is needed, and none is good.
    """
    known, holds_token = _access(connection).api_keys, _access(connection).holds_admin_token
    if not known.is_required:
        return None
    refusal = AuthenticationError("send an API key")
    for key in keys:
        authorization = f"Bearer {key}"
        if holds_token(authorization):
            return authorization
        try:
            known.authenticate([authorization], [])
        except AuthenticationError as error:
            refusal = error
        else:
            return authorization
    raise refusal


def client_name(scope: Scope) -> str:
    """Return the client's name, which the guard has set."""
    return str(scope["state"].get(_CLIENT_KEY, ANONYMOUS))


def is_operator(scope: Scope) -> bool:
    """Return True if a request may change what is served: it has the admin token, or no keys are required."""
    return bool(scope["state"].get(_OPERATOR_KEY, False))


def require_operator(scope: Scope) -> None:
    """Raise OperatorRequiredError for a request that may not change what is served."""
    if not is_operator(scope):
        raise OperatorRequiredError(
            "only an operator may load, unload, keep or fetch models and adapters here: send the admin token as "
            "Authorization: Bearer TOKEN in place of the API key"
        )


def _parse(lines: Sequence[str]) -> tuple[dict[str, bytes], list[str]]:
    """Return digests by name, and the problems of the lines, without quoting a key."""
    digests: dict[str, bytes] = {}
    problems: list[str] = []
    for number, line in enumerate(lines, start=1):
        text = line.strip(" \t\r")
        if not text or text.startswith("#"):
            continue
        name, separator, key = text.partition(":")
        digest = _digest(key)
        if not separator or not name or not _KEY.fullmatch(key):
            problems.append(
                f"line {number} is not name:key with a key of at least {_MIN_KEY_CHARACTERS} "
                "characters, all of them ASCII and none a space"
            )
        elif not name.isprintable():
            problems.append(
                f"line {number} has a name with a control character or an invisible one in it; names "
                "are shown in logs"
            )
        elif name in digests:
            problems.append(f"line {number} names {name} twice")
        elif digest in digests.values():
            problems.append(f"line {number} repeats the key of another name")
        else:
            digests[name] = digest
    if not digests and not problems:
        problems.append("the file holds no key")
    return digests, problems


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
