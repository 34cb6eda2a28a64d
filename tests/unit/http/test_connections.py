"""The budget of connections: what is closed to make room, and what happens without a descriptor."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import subprocess
import sys

import pytest

from machd.http.connections import Acceptor, Connections
from machd.http.file_limit import ACCEPTS_PER_TURN, SPARE_CONNECTIONS

_MAX = 20


class _Connection(asyncio.Protocol):
    """A connection that remembers how it ended."""

    def __init__(self) -> None:
        self.transport: asyncio.BaseTransport | None = None
        self.is_aborted = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def abort(self) -> None:
        self.is_aborted = True

    def check_age(self) -> None:
        """Nothing is too old."""


def _connections() -> Connections:
    return Connections(max_connections=lambda: _MAX, stall_timeout_s=lambda: 30.0)


def _opened(connections: Connections, count: int) -> list[_Connection]:
    opened = [_Connection() for _ in range(count)]
    for connection in opened:
        connections.add(connection)
        connections.note_waiting(connection)
    return opened


def test_the_oldest_waiting_connection_makes_room() -> None:
    """Beyond the budget each new connection closes the one that has waited longest."""
    connections = _connections()
    opened = _opened(connections, _MAX + 3)
    assert [one.is_aborted for one in opened] == [True] * 3 + [False] * _MAX


def test_a_connection_that_was_just_answered_waits_behind_the_others() -> None:
    """The wait is counted from the last answer, not from the connection's beginning."""
    connections = _connections()
    opened = _opened(connections, _MAX)
    connections.note_busy(opened[0])
    connections.note_waiting(opened[0])
    _opened(connections, 1)
    assert [one.is_aborted for one in opened[:2]] == [False, True]


def test_busy_connections_are_never_closed_to_make_room() -> None:
    """With requests on all connections, new ones take the spare places and then each other's."""
    connections = _connections()
    busy = _opened(connections, _MAX)
    for connection in busy:
        connections.note_busy(connection)
    newer = _opened(connections, SPARE_CONNECTIONS + 2)
    assert not any(one.is_aborted for one in busy)
    assert [one.is_aborted for one in newer] == [True] * 2 + [False] * SPARE_CONNECTIONS


def test_nothing_is_accepted_before_descriptors_are_given_back() -> None:
    """Aborted connections count until they have ended."""
    connections = _connections()
    opened = _opened(connections, _MAX + SPARE_CONNECTIONS + ACCEPTS_PER_TURN)
    assert connections.is_full
    connections.discard(opened[0])
    assert not connections.is_full


def test_accepting_waits_without_a_descriptor_and_goes_on_with_one() -> None:
    """With no descriptor left the failure is told a few times, not thousands; later the client gets in."""
    failures, accepted = asyncio.run(_accept_without_descriptors())
    assert 1 <= failures <= 5
    assert accepted


async def _accept_without_descriptors() -> tuple[int, bool]:
    """Failures within two seconds, and whether the client was accepted once there was a descriptor."""
    event_loop = asyncio.get_running_loop()
    failures: list[object] = []
    event_loop.set_exception_handler(lambda _loop, context: failures.append(context))
    connections, made = _connections(), list[_Connection]()

    def make() -> _Connection:
        made.append(_Connection())
        return made[-1]

    with socket.create_server(("127.0.0.1", 0)) as listening, socket.socket() as client:
        acceptor = Acceptor(listening, make, connections)
        acceptor.start()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        lowest_free = os.dup(0)
        os.close(lowest_free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
        try:
            client.connect(listening.getsockname())
            await asyncio.sleep(2)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for _ in range(600):
            if made and made[0].transport is not None:
                break
            await asyncio.sleep(0.1)
        acceptor.close()
        for connection in made:
            assert isinstance(connection.transport, asyncio.Transport)
            connection.transport.abort()
        await asyncio.sleep(0)
    return len(failures), bool(made)


@pytest.mark.parametrize(
    ("open_files", "asked", "answer"),
    [
        (256, "auto", "96 256"),
        (1024, "auto", "768 1024"),
        (1024, "100", "100 1024"),
        (100, "auto", "16 connections need a limit of 176 open files, and it is 100"),
        (256, "97", "97 connections need a limit of 257 open files, and it is 256"),
        (256, "97", "or set at most 96"),
    ],
)
def test_connections_fit_into_the_limit_of_open_files(
    open_files: int, asked: str, answer: str
) -> None:
    """A budget comes from the limit, or is refused with both numbers."""
    assert answer in _fit(f"ulimit -n {open_files}", asked)


def test_the_soft_limit_of_open_files_is_raised_as_far_as_needed() -> None:
    """A low soft limit is no limit while the hard one has room; the hard one is never touched."""
    assert _fit("ulimit -Sn 128; ulimit -Hn 4000", "1000") == "1000 1493"
    assert _fit("ulimit -Sn 128; ulimit -Hn 1000", "800") == "800 1000"


def _fit(limit: str, asked: str) -> str:
    """Connections and the soft limit afterwards, or the refusal."""
    program = (
        "import resource, sys\n"
        "from machd.errors import SettingsError\n"
        "from machd.http.file_limit import fit_connections\n"
        "asked = sys.argv[1]\n"
        "try:\n"
        "    fitted = fit_connections(asked if asked == 'auto' else int(asked))\n"
        "    print(fitted, resource.getrlimit(resource.RLIMIT_NOFILE)[0])\n"
        "except SettingsError as error:\n"
        "    print(error)\n"
    )
    command = ["sh", "-c", f'{limit}; exec "$@"', "sh", sys.executable, "-c", program, asked]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
