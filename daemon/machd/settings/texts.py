"""The forms of text that settings take.

Each rule's message continues a sentence that starts with the value: ``"a b" is not an address``.
"""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated

from pydantic import AfterValidator

__all__ = ["AdminListen", "HostName", "ListenHost", "Text", "WebOrigin"]


_MAX_PORT = 65_535


def _unicode(text: str) -> str:
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise ValueError("is not Unicode text")  # undecodable bytes: it could not be shown again
    if "\0" in text:
        raise ValueError("has a null character in it")  # no path and no name has one
    return text


def _not_empty(text: str) -> str:
    if not text.strip():
        raise ValueError("is empty")
    return text


def _listen_host(text: str) -> str:
    if text.removeprefix("unix:").strip() == "":
        raise ValueError("names nothing to listen on; give an address or unix:PATH")
    if text.startswith("unix:"):
        return text
    if "/" in text or any(character.isspace() for character in text):
        raise ValueError("is not an address; a socket file is written unix:PATH")
    if text.count(":") == 1:
        raise ValueError("has a port in it; the port is server.port")
    return text


def _admin_listen(text: str) -> str:
    if text == "off":
        return text
    if text.startswith("unix:"):
        return _listen_host(text)
    host, _, port = text.rpartition(":")
    if not re.fullmatch(r"[0-9]{1,5}", port) or int(port) > _MAX_PORT:
        raise ValueError("is not address:port, unix:PATH or off")
    try:
        is_loopback = host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        is_loopback = False
    if not is_loopback:
        raise ValueError("is not on loopback, where the admin API has to stay")
    return text


def _host_name(text: str) -> str:
    if not re.fullmatch(r"[^\s/,]+", text):
        raise ValueError("is not a host name; leave out scheme and path")
    return text


def _web_origin(text: str) -> str:
    if not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^\s/,]+", text):
        raise ValueError("is not an origin; write scheme://host or scheme://host:port, no path")
    return text


_Unicode = Annotated[str, AfterValidator(_unicode)]

Text = Annotated[_Unicode, AfterValidator(_not_empty)]
"""Any text but an empty one."""

ListenHost = Annotated[_Unicode, AfterValidator(_listen_host)]
"""An address to listen on, without its port, or ``unix:PATH``."""

AdminListen = Annotated[_Unicode, AfterValidator(_admin_listen)]
"""A loopback address with its port, ``unix:PATH``, or ``off``."""

HostName = Annotated[_Unicode, AfterValidator(_host_name)]
"""A name as the Host header has it."""

WebOrigin = Annotated[_Unicode, AfterValidator(_web_origin)]
"""An origin as the Origin header has it."""
