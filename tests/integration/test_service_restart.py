"""Restarts on an inherited socket: connections wait for the next daemon, and none is refused."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import httpx
import pytest
from support.clients.raw_client import RawClient
from support.clocks.polling import CEILING_S, wait_until
from support.daemon.service_daemon import ServiceDaemon, socket_activated
from support.engines.dialogue import chat
from support.programs.installed_programs import needs_programs
from support.programs.notify_socket import NotifySocket

_CLIENTS = 4
_STARTS_BY_HAND = 4
"""One of so many daemons is started by ``systemd-socket-activate``."""


@contextmanager
def _listening() -> Iterator[socket.socket]:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(2048)
        yield listening


class _Load:
    """Clients that ask again and again, each time over a connection of its own."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._has_ended = threading.Event()
        self._threads = [threading.Thread(target=self._ask_on) for _ in range(_CLIENTS)]
        self.outcomes: Counter[str] = Counter()
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._has_ended.set()
        for thread in self._threads:
            thread.join(CEILING_S)

    def _ask_on(self) -> None:
        while not self._has_ended.wait(0.005):
            outcome = self._ask()
            with self._lock:
                self.outcomes[outcome] += 1

    def _ask(self) -> str:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=CEILING_S)
        try:
            body = json.dumps(chat("say so"))
            connection.request(
                "POST", "/v1/chat/completions", body, {"Content-Type": "application/json"}
            )
            answer = connection.getresponse()
            text = answer.read()
        except (OSError, http.client.HTTPException) as error:
            return repr(error)
        finally:
            connection.close()
        if answer.status == 200:
            return "whole" if json.loads(text)["choices"][0]["finish_reason"] == "stop" else "cut"
        is_honest = (
            answer.status == 503
            and json.loads(text)["error"]["code"] == "draining"
            and int(answer.getheader("Retry-After", "0")) >= 1
            and answer.getheader("Connection") == "close"
        )
        return "told to come back" if is_honest else f"{answer.status} {text[:200]!r}"


def _restart(times: int) -> tuple[Counter[str], list[int]]:
    """Serve, stop and serve again under load; returns what clients saw, and the exit codes."""
    exits: list[int] = []
    with _listening() as inherited, _Load(inherited.getsockname()[1]) as load:
        for _ in range(times + 1):
            answered = load.outcomes["whole"]
            with NotifySocket() as ear:
                environ = {"NOTIFY_SOCKET": ear.path}
                # Who hands the socket over makes no difference to clients; systemd's own way costs an interpreter.
                activator = socket_activated(environ) if len(exits) % _STARTS_BY_HAND == 1 else ()
                with ServiceDaemon(
                    environ=environ, descriptors=[inherited.fileno()], activator=activator
                ) as daemon:
                    ear.wait_for("READY", "1")
                    wait_until(
                        lambda answered=answered: load.outcomes["whole"] > answered + 10,  # type: ignore[misc]
                        "requests are answered",
                    )
                    if len(exits) == times:
                        load.__exit__()  # the last one serves until nobody asks any more
                    daemon.terminate()
                    exits.append(daemon.wait())
    return load.outcomes, exits


@needs_programs("systemd-socket-activate")
@pytest.mark.parametrize("restarts", [3, pytest.param(20, marks=pytest.mark.long)])
def test_restarts_under_load_refuse_nobody(restarts: int) -> None:
    """No connection is refused or cut, and every request gets an answer or a 503."""
    outcomes, exits = _restart(restarts)

    print(dict(outcomes))  # noqa: T201 - the figures, with -s
    assert exits == [0] * (restarts + 1)
    assert set(outcomes) <= {"whole", "told to come back"}, outcomes
    assert outcomes["whole"] > 10 * restarts


def test_who_connects_while_it_drains_is_answered_by_the_next_one() -> None:
    """On an inherited socket a new connection waits in the backlog, and a stream still ends well."""
    with _listening() as inherited:
        url = f"http://127.0.0.1:{inherited.getsockname()[1]}"
        handed = [inherited.fileno()]
        with NotifySocket() as ear:
            environ = {"NOTIFY_SOCKET": ear.path}
            with ServiceDaemon(environ=environ, descriptors=handed) as old, RawClient(url) as open_:
                old.read_url()
                open_.post_json("/v1/completions", _long_completion())
                open_.read_until(b'"text"')
                old.terminate()
                ear.wait_for("STOPPING", "1")
                with ThreadPoolExecutor(1) as pool:
                    late = pool.submit(
                        httpx.post,
                        f"{url}/v1/chat/completions",
                        json=chat("say late"),
                        timeout=CEILING_S,
                    )
                    assert open_.read_answer().body.endswith(b"data: [DONE]\n\n")
                    assert old.wait() == 0
                    assert not late.done()
                    with ServiceDaemon(descriptors=handed) as new:
                        assert late.result().status_code == 200
                        new.terminate()
                        assert new.wait() == 0


def test_an_open_connection_is_told_to_go_elsewhere(tmp_path: Path) -> None:
    """A request on a connection from before the stop gets 503, and the connection is closed."""
    stall = tmp_path / "stall"
    with (
        _listening() as inherited,
        NotifySocket() as ear,
        ServiceDaemon(
            environ={"NOTIFY_SOCKET": ear.path, "STALL_FILE": str(stall)},
            descriptors=[inherited.fileno()],
        ) as daemon,
    ):
        url = daemon.read_url()
        with RawClient(url) as stream, RawClient(url) as silent, RawClient(url) as idle:
            idle.post_json("/v1/chat/completions", chat("say first"))
            assert idle.read_answer().status == 200
            idle.received = b""
            stream.post_json("/v1/completions", _long_completion())
            stream.read_until(b'"text"')
            stall.touch()  # the stream stays open until both were told
            daemon.terminate()
            ear.wait_for("STOPPING", "1")
            for client in (silent, idle):
                client.post_json("/v1/chat/completions", chat("say no"))
                answer = client.read_answer()
                assert answer.status == 503
                assert answer.json()["error"]["code"] == "draining"
                assert int(answer.headers["retry-after"]) >= 1
                assert answer.headers["connection"] == "close"
            stall.unlink()
            assert stream.read_answer().body.endswith(b"data: [DONE]\n\n")
            assert daemon.wait() == 0


def test_two_sockets_are_told_apart_by_name() -> None:
    """``public`` and ``admin`` are handed over in any order; the admin API is on its own one."""
    with _listening() as public, _listening() as admin:
        handed, names = [admin.fileno(), public.fileno()], "admin:public"
        flags = {"admin.listen": "127.0.0.1:1"}  # not listened on: the inherited one wins
        with ServiceDaemon(flags, descriptors=handed, names=names) as daemon:
            url = daemon.read_url()
            assert url == f"http://127.0.0.1:{public.getsockname()[1]}"
            admin_url = f"http://127.0.0.1:{admin.getsockname()[1]}"
            assert httpx.get(f"{url}/v1/models").status_code == 200
            assert httpx.get(f"{admin_url}/v1/models").status_code in {401, 403, 404}


@pytest.mark.parametrize("names", ["public:other", "public:public", "", "public"])
def test_sockets_that_cannot_be_told_apart_are_refused(names: str) -> None:
    """Two sockets need the two names; the line says which setting of their units gives them."""
    with _listening() as one, _listening() as other:
        handed = [one.fileno(), other.fileno()]
        with ServiceDaemon(descriptors=handed, names=names) as daemon:
            assert "FileDescriptorName=" in daemon.read_error()
            assert daemon.process.returncode == 2


def _long_completion() -> dict[str, object]:
    return {"model": "fake", "prompt": "hi", "max_tokens": 200, "stream": True}
