"""Fetching of images and videos: from listed hosts at public addresses, and from one directory."""

from __future__ import annotations

import os
import random
import socket
import ssl
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Never, cast

import pytest
from support.clocks.manual_clock import ManualClock
from support.clocks.polling import CEILING_S

from machd.clock import SystemClock
from machd.errors import InvalidRequestError
from machd.generations import media_fetch
from machd.generations.media_fetch import (
    Deadline,
    FetchRules,
    _TimedReader,
    connect_tls,
    fetch,
    resolve_host,
)
from machd.request.media import MediaKind, MediaSource
from machd.settings.vision import VisionSettings

_HOST = "images.example.org"
_URL = f"https://{_HOST}/a.png"
_PUBLIC = "93.184.216.34"
_RULES = FetchRules(frozenset({_HOST}), None, max_bytes=100, timeout_s=5.0)
_FILE = b"\x89PNG, a file"
_OK = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(_FILE), _FILE)


def _source(url: str, **fields: Any) -> MediaSource:
    return MediaSource(MediaKind.IMAGE, "messages[0].image", url=url, **fields)


_SPECIAL_PURPOSE = (
    *("192.0.0.8", "192.0.0.9", "192.0.0.10", "192.0.0.170", "192.0.0.255", "192.31.196.1"),
    *("192.52.193.1", "192.88.99.1", "192.88.99.2", "192.175.48.1", "198.51.100.1"),
    *("203.0.113.1", "2001:1::1", "2001:1::2", "2001:1::3", "2001:2::1", "2001:3::1"),
    *("2001:4:112::1", "2001:10::1", "2001:20::1", "2001:30::1", "2001:1ff:ffff::1"),
    *("2620:4f:8000::1", "3fff::1", "3fff:fff:ffff::1", "5f00::1", "100::1", "100:0:0:1::1"),
)
"""An address of every network of IANA's two registries of special-purpose addresses that no other case has."""


class _Host:
    """Answers every connection with the same bytes, and notes what was asked of it and where."""

    def __init__(self, answer: bytes = _OK, addresses: Sequence[str] = (_PUBLIC,)) -> None:
        self.answer = answer
        self.addresses = addresses
        self.resolved: list[str] = []
        self.connected: list[tuple[str, str]] = []
        self.requests: list[bytes] = []
        self._ends: list[socket.socket] = []

    def resolve(self, host: str) -> Sequence[str]:
        self.resolved.append(host)
        return self.addresses

    def connect(self, host: str, address: str, _deadline: Deadline) -> socket.socket:
        self.connected.append((host, address))
        ours, theirs = socket.socketpair()
        theirs.sendall(self.answer)
        theirs.shutdown(socket.SHUT_WR)
        self._ends.append(theirs)
        return ours

    def fetch(self, url: str = _URL, rules: FetchRules = _RULES) -> MediaSource:
        try:
            return fetch(_source(url), rules, resolve=self.resolve, connect=self.connect)
        finally:
            for end in self._ends:
                with end:
                    end.settimeout(CEILING_S)
                    self.requests.append(end.recv(65_536))

    def refusal(self, url: str = _URL, rules: FetchRules = _RULES) -> str:
        """The message of the 400 that a URL is answered with; it names the field and not the URL."""
        with pytest.raises(InvalidRequestError) as caught:
            self.fetch(url, rules)
        error = caught.value
        assert (error.http_status, error.param) == (400, "messages[0].image")
        assert error.message.startswith("messages[0].image: ")
        assert "; send " in error.message
        assert "example" not in error.message
        return error.message


def _unused(*_args: object) -> Never:
    raise AssertionError("nothing may be looked up or connected to")


# Rules


def test_rules_are_those_of_the_settings() -> None:
    """Hosts count only where URLs are allowed at all."""
    settings = VisionSettings(
        url_hosts=(_HOST,), allow_urls=True, allow_files="/srv", max_image_bytes=2048
    )
    assert FetchRules.of(settings) == FetchRules(frozenset({_HOST}), Path("/srv"), 2048)
    assert FetchRules.of(VisionSettings(url_hosts=(_HOST,))).hosts == frozenset()


def test_nothing_is_fetched_by_default() -> None:
    """Without settings neither a URL nor a file is read, and the message says which setting decides."""
    rules = FetchRules.of(VisionSettings())
    for url, setting in (
        (_URL, "vision.allow_urls"),
        ("file:///etc/hostname", "vision.allow_files"),
    ):
        with pytest.raises(InvalidRequestError, match=setting):
            fetch(_source(url), rules, resolve=_unused, connect=_unused)


def test_bytes_that_are_there_are_held_against_the_bound() -> None:
    """An image of the body itself is not fetched, and may not be larger than one that is."""
    for size in (100, 101):
        source = MediaSource(MediaKind.VIDEO, "p", content=b"x" * size, fps=2.0)
        if size <= _RULES.max_bytes:
            assert fetch(source, _RULES, resolve=_unused, connect=_unused) == source
            continue
        with pytest.raises(InvalidRequestError, match=r"vision\.max_image_bytes \(100\)"):
            fetch(source, _RULES)


# URLs


def test_a_listed_host_is_asked_for_the_file() -> None:
    """The name is resolved once, the connection goes to that address, and the request is plain."""
    host = _Host()
    source = _source(f"{_URL}?size=1&b=%20#top", fps=2.0, max_frames=3)
    fetched = fetch(source, _RULES, resolve=host.resolve, connect=host.connect)
    assert fetched == MediaSource(
        MediaKind.IMAGE, "messages[0].image", content=_FILE, fps=2.0, max_frames=3
    )
    assert host.resolved == [_HOST]
    assert host.connected == [(_HOST, _PUBLIC)]
    with host._ends[0] as end:
        request = end.recv(65_536).decode().split("\r\n")
    assert request[:2] == ["GET /a.png?size=1&b=%20 HTTP/1.1", f"Host: {_HOST}"]
    assert request[-2:] == ["", ""]
    assert not any(line.lower().startswith(("cookie:", "authorization:")) for line in request)


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\n\r\n" + _FILE,
        b"HTTP/1.0 200 OK\r\nContent-Type: text/html\r\n\r\n" + _FILE,
        b"HTTP/1.1 100 Continue\r\n\r\n" + _OK,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"5\r\n" + _FILE[:5] + b"\r\n%x\r\n" % len(_FILE[5:]) + _FILE[5:] + b"\r\n0\r\n\r\n",
    ],
)
def test_a_file_is_read_in_every_form_of_an_answer(answer: bytes) -> None:
    """With or without a length, in chunks, and whatever type the host gives it."""
    assert _Host(answer).fetch().content == _FILE


@pytest.mark.parametrize(
    "addresses",
    [
        ["127.0.0.1"],
        ["127.8.8.8"],
        ["0.0.0.0"],
        ["10.0.0.1"],
        ["172.16.0.1"],
        ["192.168.1.1"],
        ["100.64.0.1"],
        ["169.254.169.254"],
        ["192.0.2.1"],
        *([one] for one in _SPECIAL_PURPOSE),
        ["198.18.0.1"],
        ["224.0.0.1"],
        ["240.0.0.1"],
        ["255.255.255.255"],
        ["::"],
        ["::1"],
        ["::ffff:127.0.0.1"],
        ["::ffff:93.184.216.34"],
        ["::127.0.0.1"],
        ["64:ff9b::7f00:1"],
        ["64:ff9b:1::a00:1"],
        ["2002:7f00:1::"],
        ["2001:0:4136:e378:8000:63bf:3fff:fdd2"],
        ["2001:db8::1"],
        ["fe80::1"],
        ["fe80::1%2"],
        ["fec0::1"],
        ["fc00::1"],
        ["fd12:3456::1"],
        ["ff02::1"],
        ["ff0e::1"],
        [_PUBLIC, "10.0.0.1"],
        ["2606:2800:220:1::1", "::1"],
        ["10.0.0.1", _PUBLIC],
    ],
)
def test_an_address_that_is_not_public_is_not_connected_to(addresses: list[str]) -> None:
    """Private, loopback, link-local, multicast, reserved and embedded addresses: one of them refuses the host."""
    host = _Host(addresses=addresses)
    assert "has an address that is not public" in host.refusal()
    assert host.connected == []


def test_addresses_are_tried_in_their_order_until_one_answers() -> None:
    """All of them were looked at before, and none is resolved again."""
    host = _Host(addresses=["2606:2800:220:1::1", _PUBLIC, _PUBLIC, "1.1.1.1"])

    def connect(name: str, address: str, deadline: Deadline) -> socket.socket:
        if address == "2606:2800:220:1::1":
            raise OSError("planted")
        return host.connect(name, address, deadline)

    assert fetch(_source(_URL), _RULES, resolve=host.resolve, connect=connect).content == _FILE
    host._ends[0].close()
    assert host.connected == [(_HOST, _PUBLIC)]
    assert host.resolved == [_HOST]


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("https://other.example/a.png", "does not fetch from the URL's host"),
        (f"https://{_HOST}./a.png", "does not fetch from the URL's host"),
        (f"https://a.{_HOST}/", "does not fetch from the URL's host"),
        (f"https://{_HOST}.evil.example/", "does not fetch from the URL's host"),
        ("https://127.0.0.1/", "does not fetch from the URL's host"),
        ("https://[::1]/", "does not fetch from the URL's host"),
        ("https:///a.png", "does not fetch from the URL's host"),
        (f"https:{_HOST}/a.png", "does not fetch from the URL's host"),
        (f"https://evil.example\\@{_HOST}/", "with a user's name"),
        (f"https://{_HOST}@evil.example/", "with a user's name"),
        (f"https://{_HOST}:secret@{_HOST}/", "with a user's name"),
        (f"https://@{_HOST}/", "with a user's name"),
        (f"https://{_HOST}\\.evil.example/", "does not fetch from the URL's host"),
        (f"https://{_HOST}%2eevil.example/", "does not fetch from the URL's host"),
        (f"https://{_HOST}:22/", "from port 443 only"),
        (f"https://{_HOST}:99999/", "cannot be read"),
        (f"https://{_HOST}:x/", "cannot be read"),
        ("https://[::1/", "cannot be read"),
        (f"http://{_HOST}/", "of a kind that is not fetched"),
        (f"ftp://{_HOST}/", "of a kind that is not fetched"),
        (f"https://{_HOST}/\r\nX: y", "of a kind that is not fetched"),
        (f"https://{_HOST}/\u00e4", "of a kind that is not fetched"),
    ],
)
def test_a_url_of_another_host_or_form_is_not_looked_up(url: str, reason: str) -> None:
    """The host has to be listed as it stands, and nothing in the URL may be read in two ways."""
    host = _Host()
    assert reason in host.refusal(url)
    assert host.resolved == []
    assert host.connected == []


@pytest.mark.parametrize("url", [f"https://{_HOST.upper()}/a.png", f"https://{_HOST}:443/a.png"])
def test_other_spellings_of_a_listed_host_are_fetched(url: str) -> None:
    """Capitals and the port that is meant anyway change nothing."""
    assert _Host().fetch(url).content == _FILE


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"HTTP/1.1 302 Found\r\nLocation: https://127.0.0.1/\r\n\r\n", "redirects to another"),
        (b"HTTP/1.1 304 Not Modified\r\n\r\n", "redirects to another"),
        (b"HTTP/1.1 404 Not Found\r\n\r\nno", "with status 404"),
        (b"HTTP/1.1 206 Partial Content\r\n\r\nno", "with status 206"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 101\r\n\r\n", "vision.max_image_bytes (100)"),
        (b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 101, "vision.max_image_bytes (100)"),
        (
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
            b"32\r\n%s\r\n40\r\n%s\r\n0\r\n\r\n" % (b"x" * 50, b"x" * 64),
            "vision.max_image_bytes (100)",
        ),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\nshort", "could not be fetched"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\n", "could not be fetched"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", "could not be fetched"),
        *(
            (
                b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%s\r\n%s"
                % (size, b"x" * 50),
                "could not be fetched",
            )
            for size in (b"-5", b"-1", b"-32", b"ffffffffffffffff", b"1" * 300)
        ),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", "the file is empty"),
        (b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 200 + b"\r\n", "could not be fetched"),
        (b"HTTP/1.1 200 OK\r\nA: " + b"b" * 70_000 + b"\r\n\r\n", "could not be fetched"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "could not be fetched"),
        (b"", "could not be fetched"),
    ],
)
def test_an_answer_that_is_no_whole_file_is_refused(answer: bytes, reason: str) -> None:
    """Redirects, errors, too many bytes, too few, and what is no HTTP at all."""
    assert reason in _Host(answer).refusal()


_PIECES = (
    *(b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200\r\n", b"HTTP/9.9 200 OK\r\n", b"HTTP/1.1 -1 OK\r\n"),
    *(b"HTTP/1.1 99999 OK\r\n", b"Content-Length: %d\r\n", b"Content-Length: -%d\r\n"),
    *(
        b"Content-Length: \xb2\r\n",
        b"Transfer-Encoding: chunked\r\n",
        b"Transfer-Encoding: gzip\r\n",
    ),
    *(b"A\r\n", b": b\r\n", b" folded\r\n", b"\0\xff: \xfe\r\n", b"\r\n", b"\n", b"\r"),
    *(b"%x\r\n", b"-%x\r\n", b"+%x\r\n", b"0x%x\r\n", b"%x;a=b\r\n", b"1_0\r\n", b"\xd9\xa3\r\n"),
    *(b"0\r\n\r\n", b"x" * 40, b"\xff\xd8", b"\0" * 300),
)


@pytest.mark.parametrize("seed", range(300))
def test_a_generated_answer_is_a_file_or_a_refusal(seed: int) -> None:
    """Of right and wrong pieces in any order, whatever comes is at most so many bytes, or a 400 of the request."""
    source = random.Random(seed)
    pieces = source.choices(_PIECES, k=source.randint(1, 12))
    answer = b"".join(one.replace(b"%d", b"40").replace(b"%x", b"28") for one in pieces)
    if source.random() < 0.8:
        answer = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n" + answer
    host = _Host(answer)
    with suppress(InvalidRequestError):
        content = host.fetch().content
        assert content is not None
        assert 0 < len(content) <= _RULES.max_bytes


def test_a_chunk_of_all_that_a_host_sends_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A size of -1 would mean so to Python's reader, however much that is."""
    monkeypatch.setattr(media_fetch, "_FRAMING_BYTES", 1000)
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\n"
    read_bytes = 0
    receive = _TimedReader.readinto

    def counted(reader: _TimedReader, buffer: bytearray) -> int:
        nonlocal read_bytes
        count = receive(reader, buffer)
        read_bytes += count
        return count

    monkeypatch.setattr(_TimedReader, "readinto", counted)
    assert "could not be fetched" in _Host(head + b"x" * 100_000).refusal()
    assert read_bytes < 50_000


def test_a_host_without_an_address_is_refused() -> None:
    """An unknown name and an empty answer are the same to the client."""

    def fails(_host: str) -> Never:
        raise socket.gaierror

    no_addresses: Sequence[Callable[[str], Sequence[str]]] = (fails, lambda _host: [])
    for resolve in no_addresses:
        with pytest.raises(InvalidRequestError, match="has no address"):
            fetch(_source(_URL), _RULES, resolve=resolve, connect=_unused)


def test_a_name_that_no_host_can_have_has_no_address() -> None:
    """A label of 64 characters fails as an unknown name does, before anything is sent."""
    url = f"https://{'a' * 64}.example/"
    rules = FetchRules(frozenset({f"{'a' * 64}.example"}), None, max_bytes=100)
    with pytest.raises(InvalidRequestError, match="has no address"):
        fetch(_source(url), rules, resolve=resolve_host, connect=_unused)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ConnectionRefusedError(), "could not be fetched"),
        (ssl.SSLCertVerificationError(), "has no valid certificate"),
        (TimeoutError(), "took more than 5 s"),
    ],
)
def test_a_connection_that_fails_is_refused_with_its_reason(error: OSError, reason: str) -> None:
    """Every address was tried by then."""

    def connect(*_args: object) -> Never:
        raise error

    with pytest.raises(InvalidRequestError, match=reason):
        fetch(_source(_URL), _RULES, resolve=lambda _host: [_PUBLIC, "1.1.1.1"], connect=connect)


class _Dripping:
    """A connection that sends one byte a second for ever; the clock is the test's."""

    def __init__(self, clock: ManualClock, head: bytes) -> None:
        self._clock = clock
        self._head = head
        self.timeouts_s: list[float] = []

    def __enter__(self) -> _Dripping:
        return self

    def __exit__(self, *_error: object) -> None:
        """Be closed."""

    def settimeout(self, timeout_s: float) -> None:
        self.timeouts_s.append(timeout_s)

    def sendall(self, _data: bytes) -> None:
        """Take the request."""

    def recv_into(self, buffer: memoryview) -> int:
        self._clock.advance(1.0)
        buffer[:1] = self._head[:1] or b"x"
        self._head = self._head[1:]
        return 1


@pytest.mark.parametrize("head", [b"HTTP/1.1 200 OK\r\nX: ", b"HTTP/1.1 2\r\n\r\n", b"H\r\n"])
def test_a_host_that_sends_slowly_has_one_deadline_for_all_of_it(head: bytes) -> None:
    """Each byte may come in time; connection, head and body together may not take longer."""
    clock = ManualClock()
    connection = _Dripping(clock, head)

    def connect(_host: str, _address: str, deadline: Deadline) -> socket.socket:
        assert deadline.left_s() == 5.0
        clock.advance(2.0)
        return cast("socket.socket", connection)

    with pytest.raises(InvalidRequestError):
        fetch(_source(_URL), _RULES, resolve=lambda _host: [_PUBLIC], connect=connect, clock=clock)
    assert connection.timeouts_s[:4] == [3.0, 3.0, 2.0, 1.0]
    assert len(connection.timeouts_s) <= 4


@contextmanager
def _listening() -> Iterator[socket.socket]:
    """Yield a listener on loopback that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


def test_a_host_without_tls_is_not_talked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that is not encrypted in time is none, and nothing was asked over it."""
    with _listening() as listener:
        monkeypatch.setattr("machd.generations.media_fetch._HTTPS_PORT", listener.getsockname()[1])
        clock = SystemClock()
        with pytest.raises(TimeoutError):
            connect_tls(_HOST, "127.0.0.1", Deadline(clock, clock.monotonic_s() + 0.2))
        taken, _ = listener.accept()
        with taken:
            assert b"GET" not in taken.recv(65_536)


# Files


@pytest.fixture(name="directory")
def _directory(tmp_path: Path) -> Path:
    """A directory that may be read, beside a file that may not."""
    directory = tmp_path / "images"
    (directory / "inner").mkdir(parents=True)
    (directory / "a.png").write_bytes(_FILE)
    (directory / "inner" / "b c.png").write_bytes(_FILE)
    (tmp_path / "secret.png").write_bytes(_FILE)
    return directory


def _fetch_file(url: str, directory: Path | None) -> MediaSource:
    rules = FetchRules(frozenset(), directory, max_bytes=100)
    return fetch(_source(url), rules, resolve=_unused, connect=_unused)


@pytest.mark.parametrize(
    "url",
    [
        "file://{directory}/a.png",
        "file:{directory}/a.png",
        "file://localhost{directory}/a.png",
        "FILE://{directory}/a.png",
        "file://{directory}/inner/b%20c.png",
        "file://{directory}/inner/../a.png",
        "file://{directory}/link.png",
        "file://{directory}/folder/b%20c.png",
        "file://{directory}/../images/a.png",
    ],
)
def test_a_file_below_the_directory_is_read(directory: Path, url: str) -> None:
    """In every spelling of its URL, and through links that stay inside."""
    (directory / "link.png").symlink_to(directory / "a.png")
    (directory / "folder").symlink_to("inner")
    fetched = _fetch_file(url.format(directory=directory), directory)
    assert (fetched.content, fetched.url) == (_FILE, None)


def test_the_directory_itself_may_be_named_by_a_link(directory: Path, tmp_path: Path) -> None:
    """Both paths are resolved before they are compared."""
    link = tmp_path / "link"
    link.symlink_to(directory)
    assert _fetch_file(f"file://{directory}/a.png", link).content == _FILE
    assert _fetch_file(f"file://{link}/a.png", directory).content == _FILE


_OUTSIDE = "outside of the directory"
_UNREADABLE = "no regular file can be read"
_FORM = "file:/// and an absolute path"


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("file:///etc/hostname", _OUTSIDE),
        ("file:///etc/no-such-file", _OUTSIDE),
        ("file:///", _OUTSIDE),
        ("file://{directory}/../secret.png", _OUTSIDE),
        ("file://{directory}/%2e%2e/secret.png", _OUTSIDE),
        ("file://{directory}%2f..%2fsecret.png", _OUTSIDE),
        ("file://{directory}/inner/../../secret.png", _OUTSIDE),
        ("file://{directory}-other/a.png", _OUTSIDE),
        ("file://{directory}/out.png", _OUTSIDE),
        ("file://{directory}/up/secret.png", _OUTSIDE),
        ("file://{directory}/dangling.png", _OUTSIDE),
        ("file://{directory}/proc/environ", _OUTSIDE),
        ("file://{directory}/loop", _UNREADABLE),
        ("file://{directory}/pipe", _UNREADABLE),
        ("file://{directory}/inner", _UNREADABLE),
        ("file://{directory}", _UNREADABLE),
        ("file://{directory}/missing.png", _UNREADABLE),
        ("file://{directory}/a.png/b", _UNREADABLE),
        ("file://{directory}/socket", _UNREADABLE),
        ("file://{directory}/large.png", "vision.max_image_bytes (100)"),
        ("file://{directory}/empty.png", "the file is empty"),
        ("file://{directory}/a.png%00.txt", _FORM),
        ("file://{directory}/a.png?x=1", _FORM),
        ("file://{directory}/a.png#x", _FORM),
        ("file://other.example{directory}/a.png", _FORM),
        ("file:a.png", _FORM),
        ("file:", _FORM),
        ("file://{directory}/" + "a" * 5000, _UNREADABLE),
    ],
)
def test_a_file_elsewhere_or_of_another_kind_is_refused(
    directory: Path, url: str, reason: str
) -> None:
    """Traversal, links that lead out, pipes, folders, sockets, and files that are too large or empty."""
    (directory / "out.png").symlink_to(directory.parent / "secret.png")
    (directory / "up").symlink_to("..")
    (directory / "dangling.png").symlink_to("/no/such/file")
    (directory / "proc").symlink_to("/proc/self")
    (directory / "loop").symlink_to("loop")
    os.mkfifo(directory / "pipe")
    (directory / "large.png").write_bytes(b"x" * 101)
    (directory / "empty.png").touch()
    with socket.socket(socket.AF_UNIX) as listener:
        with _inside(directory):
            listener.bind("socket")
        with pytest.raises(InvalidRequestError) as caught:
            _fetch_file(url.format(directory=directory), directory)
    assert reason in caught.value.message
    assert caught.value.param == "messages[0].image"
    assert str(directory) not in caught.value.message


@contextmanager
def _inside(directory: Path) -> Iterator[None]:
    """Work in a directory, whose path may be too long for a socket."""
    before = Path.cwd()
    os.chdir(directory)
    try:
        yield
    finally:
        os.chdir(before)


def test_a_link_that_replaces_the_file_after_the_look_is_not_followed(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the path resolved to is opened without following a link."""
    link = directory / "out.png"
    link.symlink_to(directory.parent / "secret.png")
    monkeypatch.setattr(os.path, "realpath", str)
    with pytest.raises(InvalidRequestError, match=_UNREADABLE):
        _fetch_file(f"file://{link}", directory)


def test_a_directory_that_is_not_there_has_no_files(tmp_path: Path) -> None:
    """A wrong setting refuses every file and is no fault."""
    with pytest.raises(InvalidRequestError, match=_UNREADABLE):
        _fetch_file(f"file://{tmp_path}/none/a.png", tmp_path / "none")
