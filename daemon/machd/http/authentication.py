"""API keys: one authenticator for both header forms, on every route that is not marked public."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from litestar.connection import ASGIConnection
from litestar.handlers import BaseRouteHandler
from litestar.types import Scope

from machd.errors import AuthenticationError, SettingsError
from machd.settings.model import Settings

__all__ = ["ANONYMOUS", "ApiKeys", "client_name", "require_api_key"]

ANONYMOUS = "anonymous"
"""The client's name where no keys are configured."""

PUBLIC = "machd_public"
"""Route option of the few endpoints that answer without a key."""

_CLIENT_KEY = "machd_client"
_CREDENTIAL = "api-keys"
_MIN_KEY_CHARACTERS = 16


class ApiKeys:
    """Names and the SHA-256 digests of their keys; the keys themselves are not kept."""

    def __init__(self, digests: dict[str, bytes]) -> None:
        """Take over what was read; empty lets everyone in."""
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
        try:
            lines = path.read_text("utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
            raise SettingsError([f"auth.api_keys_file: cannot read {path}: {reason}"]) from None
        digests: dict[str, bytes] = {}
        problems: list[str] = []
        for number, line in enumerate(lines, start=1):
            text = line.strip()
            if not text or text.startswith("#"):
                continue
            name, separator, key = text.partition(":")
            if not separator or not name or len(key) < _MIN_KEY_CHARACTERS:
                problems.append(
                    f"auth.api_keys_file: line {number} of {path} is not name:key with a key of "
                    f"at least {_MIN_KEY_CHARACTERS} characters"
                )
            elif name in digests:
                problems.append(f"auth.api_keys_file: {path} names {name} twice")
            else:
                digests[name] = _digest(key)
        if not digests and not problems:
            problems.append(f"auth.api_keys_file: {path} holds no key")
        if problems:
            raise SettingsError(problems)
        return cls(digests)

    @classmethod
    def of(cls, settings: Settings, environ: Mapping[str, str]) -> ApiKeys:
        """The keys that the settings name, or else those of the service manager.

        Raises:
            SettingsError: The file is wrong.
        """
        if settings.auth.api_keys_file is not None:
            return cls.read(Path(settings.auth.api_keys_file))
        directory = environ.get("CREDENTIALS_DIRECTORY")
        credential = Path(directory, _CREDENTIAL) if directory else None
        return cls.read(credential) if credential and credential.is_file() else cls.none()

    @property
    def is_required(self) -> bool:
        """Whether requests need a key."""
        return bool(self._digests)

    def authenticate(self, authorization: str | None, x_api_key: str | None) -> str:
        """The name behind a request's key.

        Raises:
            AuthenticationError: There is no key, it is unknown, or two differ.
        """
        if not self._digests:
            return ANONYMOUS
        scheme, _, bearer = (authorization or "").partition(" ")
        given = {key for key in (bearer if scheme.lower() == "bearer" else None, x_api_key) if key}
        if len(given) != 1:
            raise AuthenticationError(
                "send one API key, as Authorization: Bearer KEY or as X-Api-Key"
            )
        digest = _digest(given.pop())
        # Every key is compared, and each in constant time, so that timing tells nothing.
        names = [
            name for name, known in self._digests.items() if hmac.compare_digest(known, digest)
        ]
        if not names:
            raise AuthenticationError("the API key is not known to this server")
        return names[0]


async def require_api_key(  # async so that the framework calls it here and not on a thread
    connection: ASGIConnection[Any, Any, Any, Any], handler: BaseRouteHandler
) -> None:
    """Guard of every route: names the client, or refuses.

    Raises:
        AuthenticationError: The route needs a key and there is no good one.
    """
    if handler.opt.get(PUBLIC):
        return
    keys: ApiKeys = connection.app.state.api_keys
    connection.scope["state"][_CLIENT_KEY] = keys.authenticate(
        connection.headers.get("authorization"), connection.headers.get("x-api-key")
    )


def client_name(scope: Scope) -> str:
    """The name that the guard found."""
    return str(scope["state"].get(_CLIENT_KEY, ANONYMOUS))


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
