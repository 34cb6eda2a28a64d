"""``machd bench`` against a daemon in this process; what is fast or slow is not asked here."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner, Result
from support.checkpoints.tiny_checkpoint import write_tiny_llama
from support.clocks.polling import CEILING_S
from support.daemon.running_daemon import RunningDaemon

from machd.bench.scenarios import Scenario
from machd.bench.server import ServerProcess
from machd.bench.staggered import Arrivals
from machd.cli.bench import bench, forwarded_arguments
from machd.clock import SystemClock
from machd.engine.fake.engine import FakeEngine
from machd.engine.protocol.step import StepPlan
from machd.errors import EngineFaultError, StartupError
from machd.settings.sources import load_settings

SHORT = ("--requests", "3", "--prompt-tokens", "4", "--max-tokens", "5")


def run(*args: str) -> Result:
    """Run the command with errors of machd let through."""
    return CliRunner().invoke(bench, args, catch_exceptions=False)


_TURNS = 50
"""Turns of the event loop: more than a token needs from the engine to its client's socket."""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A daemon whose tokens are sent one by one: its engine waits for the event loop."""

    async def turn() -> None:
        for _ in range(_TURNS):
            await asyncio.sleep(0)

    def wait_for_event_loop(_plan: StepPlan) -> None:
        loop = daemon._event_loop
        assert loop is not None
        asyncio.run_coroutine_threadsafe(turn(), loop).result(CEILING_S)

    daemon = RunningDaemon(lambda: FakeEngine(before_step=wait_for_event_loop))
    with daemon:
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
    assert [level["itl"]["count"] for level in levels] == [4 * 3, 4 * 4]
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
        (("--compare", "batched"), "is no mode; there are: single, static, continuous"),
        (("--scenarios", "sweep,none"), "is no scenario; there are: sweep, staggered,"),
        (("--scenarios", "structured"), "structured needs a mode that batches: --compare cont"),
        (("--scenarios", "coalescing"), "coalescing needs a mode that batches: --compare cont"),
        (("--compare", "static", "--scenarios", "long-prompt"), "long-prompt needs a mode that"),
        (("--extra-body", "{}"), "--model-id and --extra-body are for a server at --url"),
        (("--url", "http://h", "--extra-body", "[]"), "is not a JSON object"),
        (("--url", "http://h", "--scenarios", "staggered", "--plot", "b.png"), "draws the sweep"),
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
    monkeypatch.setattr("machd.cli.bench_options.can_plot", lambda: False)

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


@pytest.fixture(name="tiny_llama", scope="module")
def _tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that costs nothing, with the vocabulary of a real one."""
    return write_tiny_llama(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.mark.long
def test_modes_are_measured_one_after_the_other(tiny_llama: Path, tmp_path: Path) -> None:
    """The whole command: bare loop, servers, batches without one, and figures of each."""
    path = tmp_path / "bench.json"

    result = run(
        *(str(tiny_llama), "--compare", "single,static,continuous", "--concurrency", "2", *SHORT),
        *("--scenarios", ",".join(Scenario), "--json", str(path)),
    )

    assert result.exit_code == 0, result.output
    report = json.loads(path.read_bytes())
    single, static, continuous = levels = report["levels"]
    assert [(one["mode"], one["batch_width"]) for one in levels] == [
        ("single", 1),
        ("static", 2),
        ("continuous", 2),
    ]
    assert {one["completion_tokens"] for one in levels} == {20}
    assert single["prompt_tokens"] == static["prompt_tokens"] == continuous["prompt_tokens"] > 0
    assert all(one["ceiling"]["generation"] > 0 for one in levels)
    assert all(one["ceiling"]["itl_per_step"] > 0 for one in (single, continuous))
    assert (static["itl"], static["ceiling"]["itl_per_step"]) == (None, None)
    assert static["ttft"] == static["latency"]
    # Before the servers, and after each level; four steps a run.
    assert [(one["batch_width"], one["runs"]) for one in report["ceilings"]] == [(1, 2), (2, 3)]
    assert report["ceilings"][0]["step"]["count"] == 8
    assert [one["mode"] for one in report["staggered"]] == ["single", "static", "continuous"]
    assert all(one["static_ttft_ratio"] > 0 for one in report["staggered"])
    assert [one["mode"] for one in report["long_prompt"]] == ["continuous"]
    assert 1400 < report["long_prompt"][0]["prompt_tokens"] < 1600
    assert [one["coalesced"] for one in report["coalescing"]] == [2]
    assert [one["kept"] for one in report["structured"]] == [8]
    assert [one["completion_tokens"] for one in report["structured"]] == [96 * 5]
    assert [(one["mode"], one["decode_mode"]) for one in report["servers"]] == [
        ("single", "single"),
        ("continuous", "batched"),
    ]
    for server in report["servers"]:
        beyond_bytes = server["ready_rss_bytes"] - report["model"]["weights_bytes"]
        assert server["ready_beyond_weights_bytes"] == beyond_bytes > 0
    assert "batch_generate, without HTTP" in result.output


def test_batches_alone_need_no_server(tiny_llama: Path, tmp_path: Path) -> None:
    """Without a server the model is described by the process that ran it."""
    path = tmp_path / "bench.json"

    result = run(
        *(str(tiny_llama), "--compare", "static", "--scenarios", "staggered"),
        *(*SHORT, "--json", str(path)),
    )

    assert result.exit_code == 0, result.output
    report = json.loads(path.read_bytes())
    assert (report["levels"], report["ceilings"], report["servers"]) == ([], [], [])
    assert report["workload"]["endpoint"] is None
    assert report["model"]["id"] == "tiny-llama"
    assert report["model"]["versions"]["mlx_lm"]
    (static,) = report["staggered"]
    assert static["requests"] == 8
    # The first of four waits until the last one has arrived, and then for the batch.
    arrivals = Arrivals()
    assert static["ttft"]["p99_s"] >= (arrivals.streams - 1) * arrivals.interval_s


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
