"""``machd bench --report``: one folder with everything about a machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from support.checkpoints.tiny_checkpoint import write_tiny_llama
from support.daemon.serve_process import servers_of_this_process

from machd.cli import bench_report
from machd.cli.bench import bench
from machd.errors import EngineFaultError
from machd_bench.scenarios.memory import MEMORY
from machd_bench.scenarios.parity import WEIGHTS
from machd_bench.shared_report import LOCAL_MODEL

NAME = "name-of-its-owner"


def run(*args: str) -> Result:
    """Run the command with errors of machd let through."""
    return CliRunner().invoke(bench, args, catch_exceptions=False)


def report_in(folder: Path) -> tuple[dict[str, Any], str]:
    """The report, and the text of both files."""
    text = (folder / "report.json").read_text()
    return json.loads(text), text + (folder / "report.html").read_text()


def assert_tells_nothing(text: str, *paths: Path) -> None:
    """Neither a path nor the name of a model on this machine is in it."""
    for secret in (NAME, "://", str(Path.home()), *map(str, paths)):
        assert secret not in text


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ("--report", "{folder}", "--prefix"),
            "--report says what is measured: leave --prefix out",
        ),
        (("--report", "{folder}", "--max-tokens", "64"), "leave --max-tokens out"),
        (("--report", "{folder}", "--url", "http://h"), "leave --url out"),
        (("--quick",), "--quick goes with --report"),
        (("--report", "/dev/null/folder"), "cannot make"),
    ],
)
def test_a_report_fixes_what_is_measured(
    args: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    """An option that would change the loads is refused before anything runs."""
    result = run(*(one.format(folder=tmp_path) for one in args))

    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
    assert not list(tmp_path.iterdir())


def test_parts_that_fail_are_in_the_report_by_their_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that is not there fails every part; the terminal says why, the files do not."""
    monkeypatch.setattr(bench_report, "_SCENARIOS", (MEMORY, WEIGHTS))
    folder = tmp_path / "report"

    with pytest.raises(EngineFaultError, match="did not get through: memory, weights"):
        run(str(tmp_path / NAME), "--report", str(folder), "--quick")

    report, text = report_in(folder)
    parts = {one["scenario"]: (one["outcome"], one["error"]) for one in report["parts"]}
    assert parts == {
        "memory": ("failed", "StartupError"),
        "weights": ("failed", "EngineFaultError"),
    }
    assert "StartupError" in text
    assert_tells_nothing(text, tmp_path)


@pytest.mark.longest
def test_a_quick_report_has_every_part(tmp_path: Path) -> None:
    """A report of a tiny model has every part and not the model's name, and leaves nothing running."""
    others = servers_of_this_process()
    model = write_tiny_llama(tmp_path / NAME)
    folder = tmp_path / "report"

    result = run(str(model), "--report", str(folder), "--quick")

    assert result.exit_code == 0, result.output
    report, text = report_in(folder)
    assert {one["scenario"]: one["outcome"] for one in report["parts"]} == dict.fromkeys(
        (
            *("sweep", "long-prompt", "prefix", "memory", "formats"),
            *("weights", "parity", "guarantees"),
        ),
        "measured",
    )
    assert (report["size"], report["model"]["id"]) == ("quick", LOCAL_MODEL)
    assert report["model"]["architecture"] == "llama"
    memory = {one["case"]: one["figures"] for one in report["rows"] if one["scenario"] == "memory"}
    assert memory["8 streams"]["peak_bytes"] >= memory["ready"]["active_bytes"] > 0
    parity = {one["case"]: one["figures"] for one in report["rows"] if one["scenario"] == "parity"}
    assert {name: one["batching"] for name, one in parity.items()} == {
        "llama": "supported",
        "qwen3_next": "supported",
    }
    assert_tells_nothing(text, tmp_path, model)
    assert servers_of_this_process() == others
