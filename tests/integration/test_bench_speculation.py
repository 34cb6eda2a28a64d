"""``machd bench --speculation`` as a command: what it runs, what it prints, what it leaves behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from support.checkpoints.tiny_checkpoint import write_tiny_llama
from support.daemon.serve_process import servers_of_this_process

from machd.cli.bench import bench

SHORT = ("--speculation", "--speculation-tokens", "24", "--speculation-rounds", "1")


def run(*args: str) -> Result:
    """Run the command with errors of machd let through."""
    return CliRunner().invoke(bench, args, catch_exceptions=False)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--speculation-mode", "off"), "speculation.mode is off, with which --speculation"),
        (("--url", "http://h"), "--speculation needs two daemons of the bench's own"),
        (("--compare", "single"), "leave --compare out"),
        (("--scenarios", "staggered"), "--speculation has no scenarios"),
        (("--prefix",), "--speculation and --prefix measure different things"),
        (("--kv", "none"), "--speculation and --prefix measure different things"),
        (("--speculation-tokens", "8"), "8 is not in the range"),
        (("--speculation-rounds", "0"), "0 is not in the range"),
    ],
)
def test_bad_usage_is_told_before_anything_runs(args: tuple[str, ...], message: str) -> None:
    """Each mistake names itself and ends with exit code 2."""
    result = run("--speculation", *args)

    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


@pytest.mark.long
def test_both_daemons_are_measured_and_ended(tmp_path: Path) -> None:
    """The whole command: three workloads, the same texts with and without, nothing left running."""
    others = servers_of_this_process()
    pytest.importorskip("matplotlib")
    model = write_tiny_llama(tmp_path / "tiny-llama")
    path, plot = tmp_path / "bench.json", tmp_path / "bench.png"

    result = run(
        *(str(model), *SHORT, "--speculation-mode", "ngram"),
        *("--json", str(path), "--plot", str(plot)),
    )

    assert result.exit_code == 0, result.output
    report = json.loads(path.read_bytes())
    speculation = report["speculation"]
    assert (speculation["mode"], speculation["active_mode"]) == ("ngram", "ngram")
    assert (speculation["tokens"], speculation["rounds"]) == (24, 1)
    assert (report["workload"]["requests"], report["workload"]["max_tokens"]) == (18, 24)
    assert report["workload"]["endpoint"] == "/v1/chat/completions"
    for one in speculation["workloads"]:
        assert (one["pairs"], one["completion_tokens"]) == (3, 3 * 24)
        assert one["different_texts"] == 0
        assert one["verdict"] == "NOT SHOWN"
        assert one["ratio"]["p50"] > 0
        guesses = one["guesses"]
        assert 0 <= guesses["accepted_tokens"] <= guesses["drafted_tokens"]
        assert sum(guesses["drafted_by_position"]) == guesses["drafted_tokens"]
        assert sum(guesses["accepted_by_position"]) == guesses["accepted_tokens"]
        assert guesses["fallbacks"] == 0
    assert [one["mode"] for one in report["servers"]] == ["speculation ngram", "speculation off"]
    assert "goals are judged from 3 rounds on" in result.output
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert servers_of_this_process() == others
