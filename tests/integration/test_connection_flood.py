"""Two thousand connections without a request, against a real daemon with few descriptors."""

from __future__ import annotations

import contextlib
import json
import random
import resource
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from support.clocks.polling import CEILING_S, wait_until
from support.daemon.serve_process import ServeProcess
from support.programs.kv_subscriber import KvSubscriber

_STREAMS = 8
_MAX_LOG_BYTES = 1_000_000
_PARTS_OF_A_HEAD = [b"", b"GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1\r\n", b"P"]


@pytest.fixture(autouse=True)
def _many_open_files() -> Iterator[None]:
    """Let this process hold the other ends."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.long
@pytest.mark.parametrize(("open_files", "connections"), [(256, 2000), (1024, 2000)])
def test_streams_and_health_survive_a_flood_of_idle_connections(
    open_files: int, connections: int
) -> None:
    """Every stream ends whole, the admin listener's health always answers, and the log stays small."""
    daemon = ServeProcess(
        "--continuous-batching-enabled",
        "--continuous-batching-max-b", str(_STREAMS),
        ulimit=f"-n {open_files}",
    )  # fmt: skip
    started = threading.Barrier(_STREAMS + 1)
    with daemon, ThreadPoolExecutor(_STREAMS + 1) as pool, contextlib.ExitStack() as flood:
        streams = [pool.submit(_stream, daemon.url, started) for _ in range(_STREAMS)]
        started.wait(CEILING_S)
        is_over = threading.Event()
        health = pool.submit(_poll_health, daemon.admin_url, is_over)
        assert not any(stream.done() for stream in streams)
        for number in range(connections):
            client = flood.enter_context(
                socket.create_connection(_address(daemon.url), timeout=CEILING_S)
            )
            # The server may have closed it already, to make room.
            with contextlib.suppress(ConnectionError):
                client.sendall(_PARTS_OF_A_HEAD[number % len(_PARTS_OF_A_HEAD)])
        assert httpx.get(f"{daemon.url}/v1/models", timeout=CEILING_S).status_code == 200
        endings = [stream.result(CEILING_S) for stream in streams]
        is_over.set()
        statuses = health.result(CEILING_S)
        assert daemon.process.poll() is None
    assert endings == [b"data: [DONE]"] * _STREAMS
    assert statuses
    assert set(statuses) == {200}
    assert sum(map(len, daemon.output)) < _MAX_LOG_BYTES


@pytest.mark.long
@pytest.mark.parametrize(
    ("open_files", "connections"), [(256, 400), pytest.param(1024, 1004, marks=pytest.mark.longest)]
)
def test_connections_to_the_kv_events_leave_http_its_descriptors(
    tmp_path: Path, open_files: int, connections: int
) -> None:
    """Both listeners answer, and a subscriber that was there is still fed."""
    endpoint, replay = f"ipc://{tmp_path}/e", f"ipc://{tmp_path}/r"
    daemon = ServeProcess(
        "--kv-events-endpoint", endpoint, "--kv-events-replay-endpoint", replay,
        ulimit=f"-n {open_files}",
    )  # fmt: skip
    with daemon, KvSubscriber(endpoint) as subscriber, contextlib.ExitStack() as flood:
        _generate(daemon.url, "Once upon a time " * 40)
        wait_until(lambda: _hears(subscriber, daemon.url), "an event")
        for path in (tmp_path / "e", tmp_path / "r"):
            for _ in range(connections):
                client = flood.enter_context(socket.socket(socket.AF_UNIX))
                client.settimeout(CEILING_S)
                client.connect(str(path))
        wait_until(lambda: _hears(subscriber, daemon.url), "another event")
        assert httpx.get(f"{daemon.admin_url}/health", timeout=CEILING_S).status_code == 200
        assert httpx.get(f"{daemon.url}/v1/models", timeout=CEILING_S).status_code == 200
        assert daemon.process.poll() is None
    assert any("kv_events.connection_refused" in line for line in daemon.output)


def _hears(subscriber: KvSubscriber, url: str) -> bool:
    """Have a prompt of its own cached; returns whether an event came."""
    _generate(url, f"{random.random()} " * 80)
    return bool(subscriber._events.poll(200) and subscriber._events.recv_multipart())


def _generate(url: str, prompt: str) -> None:
    body = {"model": _model(url), "prompt": prompt, "max_tokens": 1}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=CEILING_S)
    assert answer.status_code == 200


def _model(url: str) -> str:
    return str(httpx.get(f"{url}/v1/models", timeout=CEILING_S).json()["data"][0]["id"])


def _address(url: str) -> tuple[str, int]:
    parsed = httpx.URL(url)
    assert parsed.port is not None
    return parsed.host, parsed.port


def _stream(url: str, started: threading.Barrier) -> bytes:
    """Read a whole stream; returns its last line."""
    body = {"prompt": "Once upon a time", "max_tokens": 60, "stream": True, "temperature": 1.0}
    body["model"] = _model(url)
    with httpx.stream(
        "POST", f"{url}/v1/completions", content=json.dumps(body),
        headers={"Content-Type": "application/json"}, timeout=CEILING_S,
    ) as answer:  # fmt: skip
        assert answer.status_code == 200
        lines = answer.iter_lines()
        next(lines)
        started.wait(CEILING_S)
        return [line.encode() for line in lines if line][-1]


def _poll_health(admin_url: str, is_over: threading.Event) -> list[int]:
    """Ask five times a second, over a new connection each time; returns the statuses."""
    statuses = []
    while not is_over.wait(0.2):
        statuses.append(httpx.get(f"{admin_url}/health", timeout=CEILING_S).status_code)
    return statuses
