"""The forms of text that settings take.

Each rule's message continues a sentence that starts with the value: ``"a b" is not an address``.
"""

from __future__ import annotations

import ipaddress
import os
import re
import sys
from typing import Annotated

from pydantic import AfterValidator

_MAX_PORT = 65_535
_MAX_TEXT_CHARS = 4096
"""A path of more characters cannot be opened on Linux; macOS takes 1,024."""

_MAX_HOST_CHARS = 253
"""Of a host name: RFC 1035, section 2.3.4."""

MAX_MODEL_NAME_CHARS = 256

_PATH_OPENINGS = ("/", "~", ".")
_PATH_PARTS = ("://", "..", "//", "\\")
_MAX_SLASHES = 2
"""Of a model's name: hub ids have one, and routers put the provider's name and another one before them."""

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
"""A model's id on the hub, ``ORG/NAME``."""

HUB_REVISION = re.compile(r"(?!.*\.\.)[A-Za-z0-9][A-Za-z0-9._/-]{0,199}")
"""A branch, a tag or a commit of a repository on the hub."""

MAX_SOCKET_PATH_BYTES = 107 if sys.platform == "linux" else 103
"""What ``sun_path`` holds beside the zero byte at its end."""


def _unicode(text: str) -> str:
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise ValueError("is not Unicode text")  # undecodable bytes: it could not be shown again
    if "\0" in text:
        raise ValueError("has a null character in it")  # no path and no name has one
    if len(text) > _MAX_TEXT_CHARS:
        raise ValueError(f"is longer than {_MAX_TEXT_CHARS} characters")
    return text


def _not_empty(text: str) -> str:
    if not text.strip():
        raise ValueError("is empty")
    return text


def _listen_host(text: str) -> str:
    if text.removeprefix("unix:").strip() == "":
        raise ValueError("names nothing to listen on; give an address or unix:PATH")
    if text.startswith("unix:"):
        return _socket(text)
    if "/" in text or any(character.isspace() for character in text):
        raise ValueError("is not an address; a socket file is written unix:PATH")
    if text.count(":") == 1:
        raise ValueError("has a port in it; the port is server.port")
    return _short_host(text)


def _socket(text: str) -> str:
    if len(os.fsencode(text.removeprefix("unix:"))) > MAX_SOCKET_PATH_BYTES:
        raise ValueError(
            f"is too long for a socket file: its path can have {MAX_SOCKET_PATH_BYTES} bytes"
        )
    return text


def _short_host(text: str) -> str:
    if len(text) > _MAX_HOST_CHARS:
        raise ValueError(f"is too long: a host name has {_MAX_HOST_CHARS} characters at the most")
    return text


def _admin_listen(text: str) -> str:
    if text == "off":
        return text
    if text.startswith("unix:"):
        return _listen_host(text)
    host, _, port = text.rpartition(":")
    if not re.fullmatch(r"[0-9]{1,5}", port) or int(port) > _MAX_PORT:
        raise ValueError("is not address:port, unix:PATH or off")
    if not is_loopback(host):
        raise ValueError("is not on loopback, where the admin API has to stay")
    return text


def _host_name(text: str) -> str:
    if not re.fullmatch(r"[^\s/,]+", text):
        raise ValueError("is not a host name; leave out scheme and path")
    return _short_host(text)


def _url_host(text: str) -> str:
    if not re.fullmatch(r"[a-z0-9-]+(\.[a-z0-9-]+)*", text):
        raise ValueError(
            "is not a host as URLs name it; write it in lower case, without scheme, port and path"
        )
    return _short_host(text)


def checked_model_name(text: str) -> str:
    """Return a name that a request can ask for.

    Raises:
        ValueError: It is none; the message continues a sentence that starts with the name.
    """
    if not text:
        raise ValueError("is empty")
    if len(text) > MAX_MODEL_NAME_CHARS:
        raise ValueError(f"is longer than {MAX_MODEL_NAME_CHARS} characters")
    if not text.isprintable():
        raise ValueError("has a character in it that cannot be printed")
    if text != text.strip():
        raise ValueError("begins or ends with a blank")
    if looks_like_path(text):
        raise ValueError("looks like a path or a URL, which no request may ask for")
    return text


def checked_adapter_name(text: str) -> str:
    """Return a name under which a request can ask for an adapter, alone or behind its model's and a colon.

    Raises:
        ValueError: It is none; the message continues a sentence that starts with the name.
    """
    checked_model_name(text)
    if ":" in text:
        raise ValueError("has a colon in it, which parts a model's name from its adapter's")
    return text


def looks_like_path(name: str) -> bool:
    """Return True if a request that asks for a model by this name is taken for a mistake."""
    return (
        name.startswith(_PATH_OPENINGS)
        or any(part in name for part in _PATH_PARTS)
        or name.count("/") > _MAX_SLASHES
    )


def _web_origin(text: str) -> str:
    if not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^\s/,]+", text):
        raise ValueError("is not an origin; write scheme://host or scheme://host:port, no path")
    return text


def is_same_address(host: str, port: int, admin_listen: str) -> bool:
    """Return True if the admin API would have to share the public address.

    Names other than ``localhost`` are not looked up.

    Port 0 is any free one.
    """
    if host.startswith("unix:") or admin_listen.startswith("unix:"):
        paths = {os.path.abspath(one.removeprefix("unix:")) for one in (host, admin_listen)}  # noqa: PTH100 - links stay
        return host.startswith("unix:") and admin_listen.startswith("unix:") and len(paths) == 1
    admin_host, _, admin_port = admin_listen.rpartition(":")
    if port == 0 or admin_port.lstrip("0") != f"{port}":
        return False
    public, admin = ip_address(host), ip_address(admin_host)
    if public is None or admin is None:
        return host == admin_host
    return public == admin or (public.is_unspecified and public.version == admin.version)


def is_loopback(host: str) -> bool:
    """Return True if a host means this machine alone, as far as that shows without a name server."""
    address = ip_address(host)
    return address is not None and address.is_loopback


def ip_address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return the address that a host is, in brackets or not; None for a name but ``localhost``."""
    try:
        return ipaddress.ip_address("127.0.0.1" if host == "localhost" else host.strip("[]"))
    except ValueError:
        return None


_Unicode = Annotated[str, AfterValidator(_unicode)]

Text = Annotated[_Unicode, AfterValidator(_not_empty)]
"""Any text but an empty one."""

ModelName = Annotated[str, AfterValidator(checked_model_name)]
"""A name under which requests ask for a model."""

ListenHost = Annotated[_Unicode, AfterValidator(_listen_host)]
"""An address to listen on, without its port, or ``unix:PATH``."""

AdminListen = Annotated[_Unicode, AfterValidator(_admin_listen)]
"""A loopback address with its port, ``unix:PATH``, or ``off``."""

HostName = Annotated[_Unicode, AfterValidator(_host_name)]
"""A name as the Host header has it."""

UrlHost = Annotated[_Unicode, AfterValidator(_url_host)]
"""A host's name, or its IPv4 address, as an https: URL has it."""

WebOrigin = Annotated[_Unicode, AfterValidator(_web_origin)]
"""An origin as the Origin header has it."""
