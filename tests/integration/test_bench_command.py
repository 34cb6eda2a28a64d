"""``machd bench`` against a daemon in this process; what is fast or slow is not asked here."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner, Result
from running_daemon import RunningDaemon

from machd.bench.client import Target
from machd.bench.connection import ServerAddress
from machd.bench.server import ServerProcess
from machd.cli.bench import bench, forwarded_arguments
from machd.clock import SystemClock
from machd.engine.fake import FakeEngine
from machd.errors import EngineFaultError, StartupError
from machd.settings.sources import load_settings

SHORT = ("--requests", "3", "--prompt-tokens", "4", "--max-tokens", "5")


def run(*args: str) -> Result:
    """Run the command with errors of machd let through."""
    return CliRunner().invoke(bench, args, catch_exceptions=False)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A daemon whose scripted engine is slow enough that tokens come one by one."""
    with RunningDaemon(lambda: FakeEngine(before_step=lambda _plan: time.sleep(0.02))) as daemon:
        yield daemon.url


def test_a_running_server_is_measured(url: str, tmp_path: Path) -> None:
    """The JSON counts every request and token that was asked for, at every level."""
    path = tmp_path / "new" / "folder" / "bench.json"

    result = run("--url", f"{url}/v1", "--concurrency", "1,4", *SHORT, "--json", str(path))

    assert result.exit_code == 0, result.output
    report = json.loads(path.read_bytes())
    levels = report["levels"]
    assert [(level["mode"], level["concurrency"]) for level in levels] == [
        ("remote", 1),
        ("remote", 4),
    ]
    assert [level["requests"] for level in levels] == [3, 4]
    assert [level["completion_tokens"] for level in levels] == [15, 20]
    assert [level["latency"]["count"] for level in levels] == [3, 4]
    # A machine that stalls may merge tokens into one event; never does it split one.
    assert all(1 <= level["itl"]["count"] <= 4 * level["requests"] for level in levels)
    assert all(level["prompt_tokens"] > 0 and level["ceiling"] is None for level in levels)
    assert report["model"]["id"] == "fake"
    assert report["model"]["versions"]["machd"]
    assert report["workload"]["endpoint"] == "/v1/completions"
    assert (report["ceilings"], report["servers"]) == ([], [])
    assert "remote" in result.output


def test_a_silent_port_is_69(capfd: pytest.CaptureFixture[str]) -> None:
    """Where nobody listens the exit code says so, and so does one line."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        result = run("--url", f"http://127.0.0.1:{unused.getsockname()[1]}", *SHORT)

    assert result.exit_code == 69
    assert "does not answer" in result.stderr
    assert "Traceback" not in capfd.readouterr().err


def test_a_server_that_refuses_is_a_failure(url: str) -> None:
    """A prompt that does not fit ends the bench with the server's own words."""
    with pytest.raises(EngineFaultError, match="HTTP 400") as failure:
        run("--url", url, "--prompt-tokens", "5000", "--requests", "1")

    assert failure.value.exit_code == 70


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--compare", "static"), "is no mode of this machd; it has: single"),
        (("--concurrency", "1,0"), "is not a list of positive numbers"),
        (("--concurrency", "few"), "is not a list of positive numbers"),
        (("--url", "http://h", "model"), "--url measures a server that runs already"),
        (("--url", "http://h", "--compare", "single"), "--url measures a server"),
        (("--url", "localhost:8080"), "is not a URL such as"),
        (("--requests", "0"), "0 is not in the range"),
        (("--json", "/dev/null/file"), "cannot make"),
    ],
)
def test_bad_usage_is_told_before_anything_runs(args: tuple[str, ...], message: str) -> None:
    """Each mistake names itself and ends with exit code 2."""
    result = run(*args)

    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


def test_a_plot_without_matplotlib_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The missing extra is found before a minute of measuring, not after it."""
    monkeypatch.setattr("machd.cli.bench.can_plot", lambda: False)

    result = run("--plot", str(tmp_path / "bench.png"))

    assert result.exit_code == 2
    assert "machd[plot]" in result.output


def test_the_server_gets_the_settings_of_the_command(tmp_path: Path) -> None:
    """Flags and the settings file are handed on, and come to the same settings there."""
    file = tmp_path / "machd.toml"
    file.write_text("[limits]\nmax_queue = 7\n")
    flags: dict[str, object] = {
        "model.path": "some/model",
        "model.offline": False,
        "http.allowed_hosts": "a,b",
        "streaming.interval": "2",
    }
    loaded = load_settings(config_path=file, environ={}, flags=flags)

    arguments = forwarded_arguments(loaded)

    assert arguments == [
        *("--config", str(file)),
        *("--model-path", "some/model"),
        "--no-model-offline",
        *("--streaming-interval", "2"),
        *("--http-allowed-hosts", "a,b"),
    ]


@pytest.mark.slow
def test_a_server_of_its_own_is_started_measured_and_stopped(
    embedded_model_path: Path, tmp_path: Path
) -> None:
    """The whole command on a real model: bare loop, server, level, bare loop, and figures of each."""
    path = tmp_path / "bench.json"

    result = run(str(embedded_model_path), "--concurrency", "2", *SHORT, "--json", str(path))

    assert result.exit_code == 0, result.output
    report = json.loads(path.read_bytes())
    (level,), (ceiling,), (server,) = report["levels"], report["ceilings"], report["servers"]
    assert (level["mode"], level["batch_width"], level["completion_tokens"]) == ("single", 1, 15)
    assert level["ceiling"]["generation"] > 0
    assert level["ceiling"]["itl_per_step"] > 0
    assert (ceiling["runs"], ceiling["step"]["count"]) == (2, 8)
    assert server["start_to_ready_s"] > 0
    beyond_bytes = server["ready_rss_bytes"] - report["model"]["weights_bytes"]
    assert server["ready_beyond_weights_bytes"] == beyond_bytes > 0


def test_a_model_that_is_not_there_is_bad_usage() -> None:
    """The bare loop's process says what is wrong, and the command says it too."""
    with pytest.raises(StartupError, match="no/model/here does not exist"):
        run("no/model/here")


async def test_a_server_that_cannot_start_says_why() -> None:
    """What the server told on its way out is the error, with the server's exit code."""
    with pytest.raises(StartupError, match="no/model/here does not exist") as failure:
        async with ServerProcess(["--model-path", "no/model/here"], SystemClock()):
            pytest.fail("a server without a model got ready")

    assert failure.value.exit_code == 2


async def test_a_server_that_dies_is_a_failure(embedded_model_path: Path) -> None:
    """An exit code other than 0 at the end is told, although every answer came."""

    async def kill_in_the_middle() -> None:
        args = ["--model-path", str(embedded_model_path)]
        async with ServerProcess(args, SystemClock()) as server:
            assert server.rss_bytes() > 0
            psutil.Process(server.pid).kill()

    with pytest.raises(EngineFaultError, match="exit code -9"):
        await kill_in_the_middle()


async def test_a_server_that_knows_less_is_asked_for_less() -> None:
    """Without completions and without ignore_eos, chat without it is found."""
    asked: list[tuple[str, bool]] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            path = line.split()[1].decode()
            headers = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            length = int(headers.split("content-length: ")[1].split("\r\n")[0])
            body = await reader.readexactly(length)
            if path.endswith("completions"):
                asked.append((path, b"ignore_eos" in body))
            status, reply = 404, b"{}"
            if path == "/llm/v1/models":
                status, reply = 200, b'{"data":[{"id":"m"}]}'
            elif "/chat/" in path:
                status = 400 if b"ignore_eos" in body else 200
            head = f"HTTP/1.1 {status} OK\r\ncontent-length: {len(reply)}\r\n\r\n"
            writer.write(head.encode() + reply)
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        address = ServerAddress.of(f"http://127.0.0.1:{port}/llm/v1")
        target = await Target.find(address, api_key=None, clock=SystemClock())

    assert target.model_id == "m"
    assert target.dialect.is_chat
    assert not target.dialect.ignores_eos
    assert target.dialect.counts_tokens
    assert target.capabilities is None
    completions, chat = "/llm/v1/completions", "/llm/v1/chat/completions"
    assert asked == [(completions, True), (completions, False), (chat, True), (chat, False)]
