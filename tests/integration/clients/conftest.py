"""Daemons that the client libraries talk to, and nothing else that they could talk to."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.daemon.running_daemon import RunningDaemon
from support.daemon.serve_process import ServeProcess
from support.engines.dialogue import told
from support.engines.fake_engine import FakeEngine, spelled

from machd.request.generation import SamplingParams

_CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>'
_RESULT = re.compile(r"\ntool: (.+)\n")
_LOOPBACK = {"127.0.0.1", "::1", "localhost", b"127.0.0.1", b"localhost", None}


def _says(prompt: str) -> str | None:
    """Return what the scripted model answers, where it does not just obey."""
    result = _RESULT.search(prompt)
    if result:
        return f"It is {result[1]} in Paris."
    if "weather?" in prompt:
        return _CALL
    if prompt.endswith("<think>"):
        return "Two and two.</think>Four."
    return None


def _script(prompt: tuple[int, ...], sampling: SamplingParams, position: int) -> int:
    """Asks for the weather, tells it, thinks where it is told to, and obeys ``say``."""
    said = _says(bytes(prompt).decode())
    return (told if said is None else spelled(said))(prompt, sampling, position)


@pytest.fixture(scope="session")
def served_url(embedded_model_path: Path) -> Iterator[str]:
    """A process with the embedded model that batches."""
    assert embedded_model_path.is_file()
    with ServeProcess("--continuous-batching") as server:
        yield server.url


@pytest.fixture(scope="session")
def plain_url(embedded_model_path: Path) -> Iterator[str]:
    """Serve the embedded model as ``machd serve`` does, without a setting."""
    assert embedded_model_path.is_file()
    with ServeProcess() as server:
        yield server.url


@pytest.fixture(scope="module")
def scripted_url() -> Iterator[str]:
    """A daemon in this process whose model follows the script above; other tests look at threads."""
    flags = {"continuous_batching.enabled": True}
    with RunningDaemon(lambda: FakeEngine(_script), flags) as running:
        yield running.url


@pytest.fixture(autouse=True)
def _only_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that calls home fails its test."""
    connect, resolve = socket.socket.connect, socket.getaddrinfo

    def checked_connect(self: socket.socket, address: Any) -> None:
        assert not isinstance(address, tuple) or address[0] in _LOOPBACK, address
        connect(self, address)

    def checked_resolve(host: Any, *arguments: Any, **options: Any) -> Any:
        assert host in _LOOPBACK, host
        return resolve(host, *arguments, **options)

    monkeypatch.setattr(socket.socket, "connect", checked_connect)
    monkeypatch.setattr(socket, "getaddrinfo", checked_resolve)
