"""Fetch images and videos from URLs of a request, as far as the operator allows it.

A client could use a URL to reach hosts and files through the daemon (server-side request forgery). So
a host has to be listed, all addresses of its name must be public, and the connection goes to one of the
checked addresses: the name is resolved once. Redirects and proxies are not followed. A file has to lie
in the one allowed directory.
"""

from __future__ import annotations

import http.client
import io
import os
import re
import socket
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from ipaddress import IPv4Address, IPv6Network, ip_address, ip_network
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, cast
from urllib.parse import SplitResult, unquote_to_bytes, urlsplit

from machd.clock import Clock, SystemClock
from machd.errors import InvalidRequestError
from machd.regular_files import open_regular
from machd.request.media import MediaSource
from machd.settings.vision import VisionSettings

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

_TIMEOUT_S = 10.0
_HTTPS_PORT = 443
_CLOCK = SystemClock()
_PRINTABLE_ASCII = re.compile(r"[!-~]+")
_GLOBAL_UNICAST = IPv6Network("2000::/3")
"""Global unicast of IPv6 (RFC 4291, section 2.4). Outside of it are multicast, site-local and link-local
addresses, and those that embed an IPv4 address: mapped, compatible and NAT64."""

_SPECIAL_PURPOSE = tuple(
    map(
        ip_network,
        (
            *("192.0.0.0/24", "192.31.196.0/24", "192.52.193.0/24", "192.88.99.0/24"),
            *("192.175.48.0/24", "2001::/23", "2620:4f:8000::/48", "3fff::/20"),
        ),
    )
)
"""Networks of IANA's registries of special-purpose addresses that ``ipaddress`` takes for global ones, in whole or in part and by its version:
protocol assignments, AS112, AMT, relays of 6to4, documentation."""

_FRAMING_BYTES = 1 << 20
"""Bytes of an answer's head and chunk sizes beyond twice the file's limit."""

_INSTEAD = "send the file itself in a data: URL"


@dataclass(frozen=True, slots=True)
class FetchRules:
    """Limits of fetching.

    Attributes:
        hosts: Names that https: URLs may have; none where no URL is fetched.
        directory: Files below it may be named by file: URLs; None for no file.
        max_bytes: Largest file, from a URL or in the request.
        timeout_s: Time for connection and answer together.
    """

    hosts: frozenset[str]
    directory: Path | None
    max_bytes: int
    timeout_s: float = _TIMEOUT_S

    @classmethod
    def of(cls, settings: VisionSettings) -> FetchRules:
        """Make the limits that the settings ask for."""
        return cls(
            hosts=frozenset(settings.url_hosts if settings.allow_urls else ()),
            directory=None if settings.allow_files is None else Path(settings.allow_files),
            max_bytes=settings.max_image_bytes,
        )


@dataclass(frozen=True, slots=True)
class Deadline:
    """The deadline of one fetch."""

    clock: Clock
    end_s: float

    def left_s(self) -> float:
        """Return the remaining seconds.

        Raises:
            TimeoutError: The deadline has passed.
        """
        left_s = self.end_s - self.clock.monotonic_s()
        if left_s <= 0:
            raise TimeoutError
        return left_s


Resolve: TypeAlias = Callable[[str], Sequence[str]]
"""Gives the IP addresses of a host, or raises OSError."""

Connect: TypeAlias = Callable[[str, str, Deadline], socket.socket]
"""Opens a connection to a host at one of its addresses that is encrypted and checked to be the
host's, or raises OSError."""


def resolve_host(host: str) -> Sequence[str]:
    """Look up the addresses of a host. The system's resolver sets the timeout."""
    try:
        found = socket.getaddrinfo(host, _HTTPS_PORT, type=socket.SOCK_STREAM)
    except UnicodeError:  # a label of more than 63 characters
        raise OSError from None
    return [str(address[0]) for *_, address in found]


def connect_tls(host: str, address: str, deadline: Deadline) -> socket.socket:
    """Connect to an address and require a valid certificate of the host's name."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as plain:
        plain.settimeout(deadline.left_s())
        plain.connect((address, _HTTPS_PORT))
        plain.settimeout(deadline.left_s())
        # The encrypted socket takes the connection over; closing the plain one then does nothing.
        return ssl.create_default_context().wrap_socket(plain, server_hostname=host)


def fetch(
    source: MediaSource,
    rules: FetchRules,
    *,
    resolve: Resolve = resolve_host,
    connect: Connect = connect_tls,
    clock: Clock = _CLOCK,
) -> MediaSource:
    """Get the bytes of an image or a video; for a worker thread.

    Args:
        source: The file: its bytes are checked against the limit, or its URL is fetched.
        rules: Limits of fetching.
        resolve: Looks up addresses.
        connect: Opens connections.
        clock: Reads time.

    Returns:
        The source with its content and without a URL.

    Raises:
        InvalidRequestError: It may not be fetched, cannot be, is too large or is empty.
    """
    content = source.content
    if content is None:
        assert source.url is not None, "a source without bytes has a URL"
        url = _split(source.url, source.param)
        if url.scheme == "file":
            content = _read_file(url, rules, source.param)
        else:
            deadline = Deadline(clock, clock.monotonic_s() + rules.timeout_s)
            host = _allowed_host(url, rules, source.param)
            addresses = _public_addresses(host, resolve, source.param)
            try:
                with _connected(host, addresses, connect, deadline) as connection:
                    content = _download(connection, host, url, rules, deadline, source.param)
            except (OSError, http.client.HTTPException, ValueError) as error:  # a chunk of -5 bytes
                raise _refused(source.param, _fault(error, rules.timeout_s)) from None
    if len(content) > rules.max_bytes:
        raise _too_large(source.param, rules)
    if not content:
        raise _refused(source.param, "the file is empty")
    return replace(source, content=content, url=None)


def _split(url: str, param: str) -> SplitResult:
    """Split a URL; refuse one that parsers read differently."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise _refused(param, "the URL cannot be read") from None
    if parts.scheme not in ("https", "file") or _PRINTABLE_ASCII.fullmatch(url) is None:
        raise _refused(param, "the URL is of a kind that is not fetched")
    if parts.username is not None or parts.password is not None:
        raise _refused(param, "a URL with a user's name is not fetched")
    if port not in (None, _HTTPS_PORT):
        raise _refused(param, f"URLs are fetched from port {_HTTPS_PORT} only")
    return parts


def _allowed_host(url: SplitResult, rules: FetchRules, param: str) -> str:
    if not rules.hosts:
        raise _refused(param, "this server fetches no https: URLs (vision.allow_urls)")
    if url.hostname is None or url.hostname not in rules.hosts:
        raise _refused(param, "this server does not fetch from the URL's host (vision.url_hosts)")
    return url.hostname


def _public_addresses(host: str, resolve: Resolve, param: str) -> Sequence[str]:
    """Resolve a host, and refuse it if any of its addresses is not public."""
    try:
        addresses = list(dict.fromkeys(resolve(host)))
    except OSError:
        addresses = []
    if not addresses:
        raise _refused(param, "the URL's host has no address")
    if not all(map(_is_public, addresses)):
        raise _refused(param, "the URL's host has an address that is not public")
    return addresses


def _is_public(text: str) -> bool:
    """Return whether an address is public, and embeds no other address."""
    address = ip_address(text)
    if any(address in network for network in _SPECIAL_PURPOSE):
        return False
    if isinstance(address, IPv4Address):
        return address.is_global and not address.is_multicast and not address.is_reserved
    has_ipv4 = address.sixtofour is not None or address.teredo is not None
    return address in _GLOBAL_UNICAST and address.is_global and not has_ipv4


def _connected(
    host: str, addresses: Sequence[str], connect: Connect, deadline: Deadline
) -> socket.socket:
    """Connect to the first address that answers."""
    last = OSError()
    for address in addresses:
        try:
            return connect(host, address, deadline)
        except OSError as error:
            last = error
    raise last


class _TimedReader(io.RawIOBase):
    """The bytes received on a connection, with a deadline for all reads and a limit of bytes.

    Without the limit, a chunk of -1 bytes would read until the host stops sending.
    """

    def __init__(self, connection: socket.socket, deadline: Deadline, max_bytes: int) -> None:
        self._connection = connection
        self._deadline = deadline
        self._left_bytes = max_bytes

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        self._connection.settimeout(self._deadline.left_s())
        count = self._connection.recv_into(buffer)
        self._left_bytes -= count
        if self._left_bytes < 0:
            raise http.client.HTTPException("the answer is too long")
        return count


class _TimedConnection:
    """A connection as :class:`http.client.HTTPResponse` uses one."""

    def __init__(self, connection: socket.socket, deadline: Deadline, max_bytes: int) -> None:
        self._reader = _TimedReader(connection, deadline, max_bytes)

    def makefile(self, _mode: str) -> io.BufferedReader:
        return io.BufferedReader(self._reader)


def _download(
    connection: socket.socket,
    host: str,
    url: SplitResult,
    rules: FetchRules,
    deadline: Deadline,
    param: str,
) -> bytes:
    """Send the request for a URL and read at most one byte more than the limit."""
    target = f"{url.path or '/'}{'?' if url.query else ''}{url.query}"
    lines = (
        f"GET {target} HTTP/1.1",
        f"Host: {host}",
        "User-Agent: machd",
        "Accept: image/*, video/*",
        "Accept-Encoding: identity",
        "Connection: close",
    )
    connection.settimeout(deadline.left_s())
    connection.sendall("\r\n".join([*lines, "", ""]).encode("ascii"))
    max_bytes = 2 * rules.max_bytes + _FRAMING_BYTES
    timed = cast("socket.socket", _TimedConnection(connection, deadline, max_bytes))
    with http.client.HTTPResponse(timed, method="GET") as response:
        response.begin()
        if 300 <= response.status < 400:
            raise _refused(param, "the URL redirects to another, which is not followed")
        if response.status != http.client.OK:
            raise _refused(param, f"the URL's host answered with status {response.status}")
        if response.length is not None and response.length > rules.max_bytes:
            raise _too_large(param, rules)
        content = response.read(rules.max_bytes + 1)
        if response.length and len(content) <= rules.max_bytes:
            raise http.client.IncompleteRead(b"")
    return content


def _fault(error: Exception, timeout_s: float) -> str:
    if isinstance(error, TimeoutError):
        return f"the URL's host took more than {timeout_s:g} s"
    if isinstance(error, ssl.SSLCertVerificationError):
        return "the URL's host has no valid certificate"
    return "the URL could not be fetched from its host"


def _read_file(url: SplitResult, rules: FetchRules, param: str) -> bytes:
    """Read a file of the allowed directory.

    A path outside of it gets the same error whether it exists or not. A symbolic link that is created between
    check and opening is not noticed: only the operator writes to the directory.
    """
    if rules.directory is None:
        raise _refused(param, "this server reads no file: URLs (vision.allow_files)")
    named = unquote_to_bytes(url.path)
    has_more = url.netloc not in ("", "localhost") or bool(url.query or url.fragment)
    if has_more or not named.startswith(b"/") or b"\0" in named:
        raise _refused(param, "a file: URL is file:/// and an absolute path, percent-encoded")
    directory = Path(os.path.realpath(rules.directory))
    path = Path(os.path.realpath(os.fsdecode(named)))
    if not path.is_relative_to(directory):
        raise _refused(param, "the file is outside of the directory that may be read")
    try:
        with open_regular(path, follows_links=False) as file:
            return file.read(rules.max_bytes + 1)
    except OSError:
        raise _refused(param, "no regular file can be read at that path") from None


def _too_large(param: str, rules: FetchRules) -> InvalidRequestError:
    return InvalidRequestError(
        f"{param}: the file has more bytes than vision.max_image_bytes ({rules.max_bytes}); send a "
        "smaller one",
        param=param,
    )


def _refused(param: str, reason: str) -> InvalidRequestError:
    return InvalidRequestError(f"{param}: {reason}; {_INSTEAD}", param=param)
