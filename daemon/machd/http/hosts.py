"""Names in Host and Origin headers, and which hosts no page of elsewhere can have made up."""

from __future__ import annotations

import re

from machd.settings.texts import ip_address, is_loopback

_NAME = r"\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9._-]{1,253}"
"""An address in brackets, or a host name; its length is that of RFC 1035, section 2.3.4."""

_HOST = re.compile(rf"(?P<name>{_NAME})(?::[0-9]{{1,5}})?")
_ORIGIN = re.compile(rf"[a-z][a-z0-9+.-]{{0,31}}://(?:{_NAME})(?::[0-9]{{1,5}})?")


def host_name(header: bytes | None) -> str | None:
    """The name in a Host header, in lower case and without its port; None for anything else."""
    match = _HOST.fullmatch(header.decode("latin-1") if header else "")
    return None if match is None else match["name"].lower()


def web_origin(header: bytes) -> str | None:
    """The origin in an Origin header, in lower case; None for ``null`` and anything else."""
    origin = header.decode("latin-1").lower()
    return origin if _ORIGIN.fullmatch(origin) else None


def is_own_origin(origin: bytes, host: bytes | None) -> bool:
    """Return True if a page came from the host that it calls now; whether this host is to be trusted is for others to say."""
    scheme, separator, rest = origin.partition(b"://")
    is_web = scheme.lower() in {b"http", b"https"}
    return bool(separator) and is_web and host is not None and rest.lower() == host.lower()


def is_loopback_name(name: str) -> bool:
    """Return True if it means this machine; no name is looked up."""
    return _is_localhost(name) or is_loopback(name)


def needs_no_name_server(name: str) -> bool:
    """Return True if a host cannot be a foreign name that was made to point here (DNS rebinding)."""
    return _is_localhost(name) or ip_address(name) is not None


def _is_localhost(name: str) -> bool:
    return name == "localhost" or name.endswith(".localhost")
