"""The goals of a report and their verdicts."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
from unit.bench.bench_reports import made_prefix, made_report
from unit.bench.speculation_samples import made_speculation

from machd.bench.goal import Goal, Verdict
from machd.bench.goals import goals_of, has_goals
from machd.bench.modes import CONTINUOUS, MODES, REMOTE, SINGLE, STATIC, Mode
from machd.bench.report import BenchReport
from machd.bench.scenarios import Scenario


def verdicts(report: BenchReport, name: str) -> list[tuple[float, float | None, str]]:
    """Goal, figure and verdict of the goals whose name holds a text."""
    return [
        (one.goal, one.figure, one.verdict.value) for one in goals_of(report) if name in one.name
    ]


@pytest.mark.parametrize(
    ("figure", "at_most", "at_least"),
    [
        (0.9, Verdict.PASS, Verdict.MISSED),
        (1.0, Verdict.PASS, Verdict.PASS),
        (1.1, Verdict.MISSED, Verdict.PASS),
        (None, Verdict.NOT_SHOWN, Verdict.NOT_SHOWN),
    ],
)
def test_goal_verdict_depends_on_the_side_of_the_bound(
    figure: float | None, at_most: Verdict, at_least: Verdict
) -> None:
    """A figure equal to its goal reaches it, and a missing figure shows nothing."""
    assert Goal.at_most("a", 1.0, figure).verdict is at_most
    assert Goal.at_least("a", 1.0, figure).verdict is at_least


@pytest.mark.parametrize("figure", [0.9, 1.1])
def test_goal_is_neither_reached_nor_missed_when_its_figure_proves_nothing(figure: float) -> None:
    """A figure that is not to be judged leaves the verdict open on either side."""
    assert Goal.at_most("a", 1.0, figure, shown=False).verdict is Verdict.NOT_SHOWN
    assert Goal.at_least("a", 1.0, figure, shown=False).verdict is Verdict.NOT_SHOWN


def test_goal_line_has_verdict_figure_and_goal() -> None:
    """The line that ``--check`` prints needs no table beside it."""
    missed = Goal.at_most("SIGTERM ends a daemon", 1.0, 1.234, "s")
    assert str(missed) == "MISSED: SIGTERM ends a daemon: 1.23 s, goal at most 1 s"
    unknown = Goal.at_least("rows", 1.8, None)
    assert str(unknown) == "NOT SHOWN: rows: not measured, goal at least 1.8 x"


def test_goals_of_a_report_cover_every_part_that_has_a_goal() -> None:
    """Scenarios, speculation, guarantees and the prefix cache give the verdicts of their tables."""
    report = made_report()

    assert verdicts(report, "staggered") == [(6.0, 7.0, "PASS")]
    assert verdicts(report, "coalescing") == [(1.1, 1.05, "PASS")]
    ((goal, ratio, verdict),) = verdicts(report, "structured")
    assert (goal, verdict) == (0.85, "MISSED")
    assert ratio == pytest.approx(0.8)
    assert [one[2] for one in verdicts(report, "speculation")] == ["PASS", "MISSED", "PASS"]
    assert verdicts(report, "bad body") == [(2.0, 0.5, "PASS")]
    assert verdicts(report, "SIGTERM") == [(1.0, 1.2, "MISSED")]
    assert verdicts(report, "chat") == [(5.0, None, "NOT SHOWN")]
    assert verdicts(report, "lookups") == [(3, 2, "MISSED")]
    assert verdicts(report, "warm over cold") == [(0.1, 0.05, "PASS")]
    assert verdicts(report, "after a restart") == [(0.25, 0.5, "MISSED")]
    assert [one[2] for one in verdicts(report, "shared system prompt")] == ["PASS"]
    assert verdicts(report, "full cache") == [(0.03, 0.05, "MISSED")]
    assert verdicts(report, "affine8") == [(0.9, 0.91, "PASS"), (1.8, 1.88, "PASS")]
    assert len(verdicts(report, "long-prompt")) == 1
    assert len(goals_of(report)) == 17


def test_prefix_goals_are_not_shown_when_prompts_are_too_short() -> None:
    """Times of short prompts miss no goal, whatever they are."""
    prefix = made_prefix()
    latency = msgspec.structs.replace(prefix.latency, prompt_tokens=60, warm_ratio=0.9)
    assert prefix.full_cache is not None
    full = msgspec.structs.replace(prefix.full_cache, prompt_tokens=60)
    short = msgspec.structs.replace(prefix, latency=latency, full_cache=full)
    report = msgspec.structs.replace(made_report(), prefix=[short])

    for name in ("warm over cold", "after a restart", "full cache"):
        assert [one[2] for one in verdicts(report, name)] == ["NOT SHOWN"]


def test_full_cache_goal_is_not_shown_when_pairs_lie_on_both_sides() -> None:
    """Quartiles around the goal leave it open, as in the table."""
    prefix = made_prefix()
    assert prefix.full_cache is not None
    full = msgspec.structs.replace(prefix.full_cache, cost_quartiles=(0.01, 0.11))
    changed = msgspec.structs.replace(prefix, full_cache=full)
    report = msgspec.structs.replace(made_report(), prefix=[changed])

    assert verdicts(report, "full cache") == [(0.03, 0.05, "NOT SHOWN")]


def test_speculation_goals_are_not_shown_when_rounds_are_few() -> None:
    """One round reaches no goal and misses none."""
    report = msgspec.structs.replace(made_report(), speculation=made_speculation(rounds=(1.0,)))

    assert {one[2] for one in verdicts(report, "speculation")} == {"NOT SHOWN"}


@pytest.mark.parametrize(
    ("scenarios", "modes", "expected"),
    [
        ([Scenario.SWEEP], MODES, False),
        ([Scenario.STAGGERED], [CONTINUOUS], False),
        ([Scenario.STAGGERED], [STATIC], False),
        ([Scenario.STAGGERED], [STATIC, CONTINUOUS], True),
        ([Scenario.STAGGERED], [REMOTE], False),
        ([Scenario.SWEEP, Scenario.STRUCTURED], [CONTINUOUS], True),
        ([Scenario.LONG_PROMPT], [REMOTE], True),
        ([Scenario.COALESCING], [SINGLE], False),
    ],
)
def test_scenarios_have_goals_when_a_mode_gives_the_figure(
    scenarios: Sequence[Scenario], modes: Sequence[Mode], *, expected: bool
) -> None:
    """The sweep has no goal, and staggered arrivals have one against static batching alone."""
    assert has_goals(scenarios, modes) is expected
