"""``machd bench --check``: the exit code and what standard error says of goals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from msgspec.structs import replace
from unit.bench.bench_reports import made_guarantees, made_report

from machd.bench.goals import goals_of
from machd.bench.guarantees.figures import GuaranteeFigures
from machd.bench.guarantees.run import GuaranteesBench
from machd.bench.report import BenchReport
from machd.bench.run import Bench
from machd.cli.bench import bench


def run(*args: str) -> Result:
    """Run the command with errors of machd let through."""
    return CliRunner().invoke(bench, args, catch_exceptions=False)


def made_up(monkeypatch: pytest.MonkeyPatch, guarantees: list[GuaranteeFigures]) -> None:
    """Let ``--guarantees`` measure these figures, without a daemon."""
    empty = ("levels", "ceilings", "staggered", "long_prompt", "coalescing", "structured")
    alone = replace(made_report(), **{name: [] for name in (*empty, "prefix")}, speculation=None)
    report = replace(alone, guarantees=guarantees)
    report = replace(report, goals=goals_of(report))

    async def measure(_bench: GuaranteesBench, _args: object) -> BenchReport:
        return report

    monkeypatch.setattr(GuaranteesBench, "measure", measure)


def test_missed_goal_is_exit_code_1_and_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Standard error names the goal and the figure; the table and the JSON are written as well."""
    made_up(monkeypatch, made_guarantees())
    path = tmp_path / "bench.json"

    result = run("--guarantees", "--check", "--json", str(path))

    assert result.exit_code == 1
    assert result.stderr.splitlines() == [
        "machd: MISSED: SIGTERM ends a daemon: 1.2 s, goal at most 1 s",
        "machd: NOT SHOWN: a chat is answered: not measured, goal at most 5 s",
    ]
    assert "SIGTERM ends a daemon" in result.stdout
    verdicts = [one["verdict"] for one in json.loads(path.read_bytes())["goals"]]
    assert verdicts == ["PASS", "MISSED", "NOT SHOWN"]


def test_missed_goal_is_exit_code_0_without_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bench that is not asked to check only tells."""
    made_up(monkeypatch, made_guarantees())

    result = run("--guarantees")

    assert (result.exit_code, result.stderr) == (0, "")
    assert "MISSED" in result.stdout


def test_check_is_exit_code_0_when_no_goal_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A goal that is not shown is named, and is no failure."""
    kept, _, unknown = made_guarantees()
    made_up(monkeypatch, [kept, unknown])

    result = run("--guarantees", "--check")

    assert result.exit_code == 0
    assert result.stderr.startswith("machd: NOT SHOWN: a chat is answered")


@pytest.mark.parametrize(("goal_ratio", "exit_code"), [(0.8, 1), (0.9, 0)])
def test_check_covers_goals_of_scenarios(
    monkeypatch: pytest.MonkeyPatch, goal_ratio: float, exit_code: int
) -> None:
    """The goal of structured answers decides the exit code of a run of that scenario."""
    made = made_report()
    empty = ("levels", "ceilings", "staggered", "long_prompt", "coalescing", "prefix")
    report = replace(
        made,
        **{name: [] for name in (*empty, "guarantees")},
        structured=[replace(made.structured[0], ratio=goal_ratio)],
        speculation=None,
    )
    report = replace(report, goals=goals_of(report))

    async def measure(_bench: Bench, _modes: object, _args: object) -> BenchReport:
        return report

    monkeypatch.setattr(Bench, "measure_modes", measure)

    result = run("--scenarios", "structured", "--compare", "continuous", "--check")

    assert result.exit_code == exit_code
    assert ("MISSED: continuous, structured" in result.stderr) == bool(exit_code)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--check",), "--check needs a goal, and this run has none"),
        (("--check", "--url", "http://h", "--scenarios", "staggered"), "--check needs a goal"),
        (("--guarantees", "--url", "http://h"), "leave --url out"),
        (("--guarantees", "--compare", "single"), "leave --compare out"),
        (("--guarantees", "--scenarios", "staggered"), "--guarantees has no scenarios"),
        (("--guarantees", "--prefix"), "neither the prefix cache nor speculation"),
        (("--guarantees", "--kv", "none"), "neither the prefix cache nor speculation"),
        (("--guarantees", "--speculation"), "neither the prefix cache nor speculation"),
        (("--guarantees", "--plot", "x.png"), "--guarantees has no plot"),
    ],
)
def test_usage_error_comes_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, args: tuple[str, ...], message: str
) -> None:
    """Options that cannot be combined or checked are exit code 2, and the message names the option."""
    monkeypatch.chdir(tmp_path)

    result = run(*args)

    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
