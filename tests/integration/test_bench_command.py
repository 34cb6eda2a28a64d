"""``machd bench`` as a command; what is fast or slow is not asked here."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import tempfile
from pathlib import Path
from typing import Any

import psutil
import pytest
from click.testing import CliRunner, Result
from support.checkpoints.tiny_checkpoint import write_tiny_llama
from support.daemon.serve_process import servers_of_this_process
from support.programs.caching_openai import CachingOpenAi
from support.programs.fake_openai import FakeOpenAi

from machd.cli.bench import bench, forwarded_arguments
from machd.clock import SystemClock
from machd.errors import EngineFaultError, StartupError
from machd.settings.sources import load_settings
from machd.user_directories import user_cache_directory
from machd_bench.generated_checkpoint import MoeShape, write_generated_checkpoint
from machd_bench.scenarios import SCENARIOS
from machd_bench.serve_process import serve
from machd_probes.vision_families import checkpoint
from machd_probes.vision_families.checkpoint import write_family

SHORT = ("--requests", "3", "--prompt-tokens", "4", "--max-tokens", "5", "--prefix-tokens", "60")


def run(*args: str) -> Result:
    """Run the command with errors of machd let through."""
    return CliRunner().invoke(bench, args, catch_exceptions=False)


def rows_in(path: Path) -> dict[str, list[dict[str, Any]]]:
    """The rows of a report's scenarios."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for row in json.loads(path.read_bytes())["rows"]:
        rows.setdefault(row["scenario"], []).append(row)
    return rows


async def test_every_scenario_runs_against_any_server(tmp_path: Path) -> None:
    """Scenarios that the server does not get through are told at the end, and the rest is kept."""
    path = tmp_path / "new" / "folder" / "bench.json"
    names = "sweep,staggered,long-prompt,coalescing,structured,prefix,sharing"
    server = CachingOpenAi(step_s=0.005, refuses=frozenset({"response_format"}))
    async with server.running() as url:
        args = ("--url", url, "--scenarios", names, *SHORT, "--concurrency", "1,4")
        with pytest.raises(
            EngineFaultError, match="did not get through: long-prompt, structured;"
        ) as failure:
            await asyncio.to_thread(run, *args, "--json", str(path))

    assert failure.value.exit_code == 70
    report = json.loads(path.read_bytes())
    assert (report["url"], report["model"]) == (url, {"id": "first"})
    rows = rows_in(path)
    assert [one["figures"]["completion_tokens"] for one in rows["sweep"]] == [15, 20]
    assert rows.keys() == set(names.split(",")) - {"structured", "long-prompt"}
    assert any("not restarted" in note for note in report["notes"])


async def test_servers_take_turns_in_one_report(tmp_path: Path) -> None:
    """Two servers at URLs, with a name and a model of the second: the table and the JSON hold the ratio."""
    path = tmp_path / "bench.json"
    quick, slow = FakeOpenAi(0.001, word_s=0.001), FakeOpenAi(0.02, word_s=0.001)
    async with quick.running() as url, slow.running() as peer:
        args = ("--url", url, "--against", f"mlx_lm.server={peer}#second", "--peer-rounds", "2")
        result = await asyncio.to_thread(
            run, *args, *SHORT, "--concurrency", "16", "--json", str(path)
        )

    assert result.exit_code == 0, result.output
    assert "16 streams, mlx_lm.server" in result.output
    first, second = [one["figures"] for one in rows_in(path)["peers"]]
    assert (first["rounds"], second["server"]) == (2, "mlx_lm.server")
    assert second["tps_p25_ratio"] > 1
    assert {body["model"] for _, body in slow.asked} == {"second"}


def test_a_silent_port_is_69(capfd: pytest.CaptureFixture[str]) -> None:
    """A port without a listener is told by the exit code and by one line."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        result = run("--url", f"http://127.0.0.1:{unused.getsockname()[1]}", *SHORT)

    assert result.exit_code == 69
    assert "does not answer" in result.stderr
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--compare", "both"), "is no mode; there are: single, static, batched"),
        (("--scenarios", "sweep,none"), "is no scenario; there are: sweep, peers, staggered,"),
        (("--scenarios", "structured"), "structured needs --compare batched"),
        (("--compare", "static", "--prefix"), "prefix needs --compare single, batched"),
        (("--url", "http://h", "--speculation"), "speculation needs a server of the bench's own"),
        (("--compare", "static", "--vision"), "needs --compare"),
        (("--compare", "single", "--vision"), "image-join needs --compare batched"),
        (("--kv", "int8"), "'int8' is no format; there are: none, affine8"),
        (("--extra-body", "{}"), "--model-id and --extra-body are for a server at --url"),
        (("--url", "http://h", "--extra-body", "[]"), "is not a JSON object"),
        (("--speculation", "--speculation-mode", "off"), "speculation.mode is off"),
        (("--concurrency", "1,0"), "is not a list of positive numbers"),
        (("--url", "http://h", "model"), "--url measures a server that runs already"),
        (("--url", "localhost:8080"), "is not a URL such as"),
        (("--users", "1"), "1 is not in the range"),
        (("--against", "localhost:8081"), "is not a URL such as"),
        (("--scenarios", "peers"), "peers needs a server to take turns with"),
        (("--against", "http://h", "--compare", "single"), "peers needs --compare batched"),
        (("--check",), "--check needs a goal"),
        (("--json", "/dev/null/file"), "cannot make"),
    ],
)
def test_bad_usage_is_told_before_anything_runs(args: tuple[str, ...], message: str) -> None:
    """Each mistake names itself and ends with exit code 2."""
    result = run(*args)

    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


def test_nothing_measured_is_an_error_and_no_plot(tmp_path: Path) -> None:
    """The command says that every weight format is left out, and draws nothing."""
    plot = tmp_path / "bench.png"
    absent = str(tmp_path / "absent")
    with pytest.raises(EngineFaultError, match="nothing was measured"):
        run(absent, "--formats", "f32", "--widths", "1", "--plot", str(plot))
    assert not plot.exists()


async def test_a_missed_goal_is_exit_code_1() -> None:
    """With --check, and by name; without it the report is all that there is."""
    async with FakeOpenAi(step_s=0.01, word_s=0.002, stalls=True).running() as url:
        args = ("--url", url, "--scenarios", "long-prompt", *SHORT, "--long-prompt-tokens", "200")
        missed = await asyncio.to_thread(run, *args, "--check")
        told = await asyncio.to_thread(run, *args)

    assert (missed.exit_code, told.exit_code) == (1, 0)
    assert "machd: MISSED: p99 gap meanwhile over median gap before" in missed.stderr


def test_the_server_gets_the_settings_of_the_command(tmp_path: Path) -> None:
    """Flags and the settings file are handed on, and come to the same settings there."""
    file = tmp_path / "machd.toml"
    file.write_text("[limits]\nmax_queue = 7\n")
    flags: dict[str, object] = {"model.path": "some/model", "model.offline": False}
    loaded = load_settings(config_path=file, environ={}, flags=flags)

    arguments = forwarded_arguments(loaded)

    expected = ["--config", str(file), "--model-path", "some/model", "--no-model-offline"]
    assert arguments == expected


_NEED_A_TEST_OF_THEIR_OWN = {"experts", "formats", "vision-prefix", "image-join", "peers"}
"""A llama has no experts and takes no images, formats start a server each, and peers are other servers."""


@pytest.mark.long
def test_images_are_measured_on_a_generated_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without MODEL a vision model is written, its lookups pass, and nothing is left running or on disk."""
    others = servers_of_this_process()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    asked: list[str] = []

    def write_tiny(name: str, directory: Path, cache_directory: Path, *, scale: str) -> Path:
        asked.append(scale)
        return write_family(name, directory, cache_directory)

    monkeypatch.setattr(checkpoint, "write_family", write_tiny)
    path = tmp_path / "bench.json"
    result = run("--vision", "--image-side", "112", *SHORT, "--json", str(path))

    assert result.exit_code == 0, result.output
    assert asked == ["mid"]
    rows = rows_in(path)
    assert rows.keys() == {"vision-prefix", "image-join", "server"}
    steps = {one["case"]: one["figures"]["verdict"] for one in rows["vision-prefix"][:11]}
    assert set(steps.values()) == {"PASS"}, steps
    assert rows["image-join"][0]["figures"]["streams"] == 8
    assert servers_of_this_process() == others
    assert {one.name for one in tmp_path.iterdir()} == {"bench.json"}


@pytest.mark.parametrize("name", ["vision-prefix", "image-join"])
def test_a_text_model_has_no_figures_of_images(embedded_model_path: Path, name: str) -> None:
    """The command says what the scenario needs."""
    with pytest.raises(StartupError, match=f"{name} needs a model that takes images"):
        run(str(embedded_model_path), "--scenarios", name, *SHORT)


@pytest.mark.long
def test_experts_and_weight_formats_are_measured_in_one_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each share and each format has its rows, half of the experts reads, and nothing is left running or on disk."""
    others = servers_of_this_process()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    shape = MoeShape(hidden=128, inner=64, layers=2, experts=16, chosen=2)
    model = write_generated_checkpoint(tmp_path / "moe", shape, user_cache_directory(os.environ))
    path, plot = tmp_path / "bench.json", tmp_path / "bench.png"

    result = run(
        *(str(model), *SHORT, "--experts", "0.5,1", "--formats", "f32,affine4,nvfp4"),
        *("--widths", "1,2", "--json", str(path), "--plot", str(plot)),
    )

    assert result.exit_code == 0, result.output
    rows = rows_in(path)
    assert rows.keys() == {"experts", "formats"}
    by_share = {
        (one["figures"]["share"], one["figures"]["streams"]): one["figures"]
        for one in rows["experts"]
    }
    assert by_share.keys() == {
        (share, streams) for share in (None, 1, 0.5) for streams in (1, 4, 8)
    }
    assert by_share[1, 8]["read_bytes_per_token"] == 0
    assert by_share[0.5, 8]["read_bytes_per_token"] > 0
    assert 0 < by_share[0.5, 1]["decode_hit_rate"] <= 1
    assert by_share[0.5, 1]["bank_bytes"] == by_share[1, 1]["bank_bytes"] // 2
    formats = {one["case"]: one["figures"] for one in rows["formats"]}
    assert formats.keys() == {
        f"{name}, width {width}" for name in ("f32", "affine4", "nvfp4") for width in (1, 2)
    }
    weights = {name: one["weights_bytes"] for name, one in formats.items()}
    assert weights["f32, width 1"] > 5 * weights["affine4, width 1"]
    assert all(one["perplexity"] > 1 for one in formats.values())
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert servers_of_this_process() == others
    assert {one.name for one in tmp_path.iterdir()} == {"moe", "bench.json", "bench.png"}


@pytest.mark.longest
def test_every_scenario_is_measured_in_one_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bare loop, servers, batches without one; nothing is left running or on disk."""
    others = servers_of_this_process()
    pytest.importorskip("matplotlib")
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    model = write_tiny_llama(tmp_path / "tiny-llama")
    path, plot = tmp_path / "bench.json", tmp_path / "bench.png"
    names = [name for name in SCENARIOS if name not in _NEED_A_TEST_OF_THEIR_OWN]

    result = run(
        *(str(model), *SHORT, "--compare", "single,static,continuous", "--concurrency", "2"),
        *("--scenarios", ",".join(names), "--guarantees", "--speculation-mode", "ngram"),
        *("--speculation-tokens", "24", "--speculation-rounds", "1", "--max-tokens", "24"),
        *("--json", str(path), "--plot", str(plot)),
    )

    assert result.exit_code == 0, result.output
    rows = rows_in(path)
    assert rows.keys() == {*names, "guarantees", "server"}
    static, single, continuous = [one["figures"] for one in rows["sweep"]]
    assert [one["completion_tokens"] for one in (static, single, continuous)] == [96] * 3
    assert all(one["ceiling_share"] > 0 for one in (static, single, continuous))
    assert (static["gap_p50_s"], static["ttft_p50_s"]) == (None, static["latency_p50_s"])
    # Before the servers, and after each level.
    assert [(one["case"], one["figures"]["runs"]) for one in rows["ceiling"]] == [
        ("width 1", 2),
        ("width 2", 3),
    ]
    steps = {row["case"][:2]: row["figures"]["verdict"] for row in rows["prefix"][-12:-4]}
    # A random model's answer is nonsense, and some nonsense becomes as many, but other tokens when
    # it is read again: its next turn (2b) cannot find it.
    assert [step for step, verdict in steps.items() if verdict == "MISSED"] in ([], ["2b"])
    assert all(row["figures"]["differ"] == 0 for row in rows["speculation"])
    assert {row["figures"]["tries"] for row in rows["guarantees"]} == {3}
    assert rows["kv-formats"][1]["figures"]["rows_ratio"] > 1.5
    assert [row["figures"]["decode_mode"] for row in rows["server"]] == ["single", "batched"]
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert servers_of_this_process() == others
    assert {one.name for one in tmp_path.iterdir()} == {"tiny-llama", "bench.json", "bench.png"}


@pytest.mark.parametrize("args", [(), ("--prefix",)], ids=["bare loop", "server"])
def test_a_model_that_is_not_there_is_bad_usage(args: tuple[str, ...]) -> None:
    """The process that should load it says what is wrong, and the command says it too."""
    with pytest.raises(StartupError, match="no/model/here does not exist") as failure:
        run("no/model/here", *args)

    assert failure.value.exit_code == 2


async def test_a_server_that_dies_is_a_failure(embedded_model_path: Path) -> None:
    """An exit code other than 0 at the end is told, although every answer came."""

    async def kill_in_the_middle() -> None:
        async with serve(["--model-path", str(embedded_model_path)], SystemClock()) as server:
            assert server.rss_bytes() > 0
            psutil.Process(server.process.pid).kill()

    with pytest.raises(EngineFaultError, match="exit code -9"):
        await kill_in_the_middle()
