"""Figures, goals and tables."""

from __future__ import annotations

import io
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from machd_bench.bench import Mode
from machd_bench.plot import write_plot
from machd_bench.prompts import make_prompts
from machd_bench.report import Bound, Figure, Goal, Report, Row, Verdict, machine_facts, percentiles
from machd_bench.scenario import Scenario
from machd_bench.scenarios import SCENARIOS
from machd_bench.table import print_scenario, print_summary, table_cells
from machd_guarantees.guarantees import GUARANTEES


def made_rows(scenario: Scenario, value: float) -> list[Row]:
    """Two rows for each of the scenario's modes, in which every figure has this value."""
    figures = dict.fromkeys(scenario.columns, value)
    goals = [Goal.judge("a figure", "at most", 0.1, value)]
    samples = {"gap_s": [value], "gap_ended_s": [0.0]}
    return [
        Row(
            scenario=scenario.name,
            mode=mode.value,
            case=f"{clients} clients",
            figures={
                **figures,
                "clients": clients,
                "batch_width": clients,
                **dict.fromkeys(("streams", "width"), clients),
                "share": 0.5,
                "format": "f32",
            },
            samples=samples,
            goals=goals,
        )
        for mode in sorted(scenario.modes - {Mode.REMOTE, Mode.STATIC}, reverse=True)
        for clients in (1, 16)
    ]


def made_report(value: float) -> Report:
    """A report of all scenarios."""
    rows = [row for one in SCENARIOS.values() for row in made_rows(one, value)]
    return Report(
        started_at="2026-01-01T00:00:00+00:00",
        url=None,
        machine=machine_facts(),
        model={"id": "tiny", "weights_bytes": 1_000_000, "dtype": "float32", "mlx": "1.0"},
        plan={"prompt_tokens": 128, "max_tokens": 64},
        rows=rows,
        goals=[goal for row in rows for goal in row.goals],
        notes=["a note"],
    )


def test_percentiles_are_linear_between_ranks() -> None:
    """Figures match other benchmarks of servers; no sample is null, not zero."""
    found = percentiles("ttft", [float(one) for one in range(101)])

    assert found == {"ttft_p50_s": 50.0, "ttft_p90_s": 90.0, "ttft_p99_s": 99.0}
    assert set(percentiles("gap", []).values()) == {None}


@pytest.mark.parametrize(
    ("bound", "figure", "verdict"),
    [
        ("at most", 1.0, Verdict.PASS),
        ("at most", 1.1, Verdict.MISSED),
        ("at least", 1.0, Verdict.PASS),
        ("at least", 0.9, Verdict.MISSED),
        ("at least", None, Verdict.NOT_SHOWN),
    ],
)
def test_a_goal_is_reached_by_a_figure_that_equals_it(
    bound: Bound, figure: float | None, verdict: Verdict
) -> None:
    """On either side; a figure that shows nothing is no verdict, whatever it is."""
    assert Goal.judge("it", bound, 1.0, figure).verdict is verdict
    assert Goal.judge("it", bound, 1.0, figure, shown=False).verdict is Verdict.NOT_SHOWN


@pytest.mark.parametrize("value", [0.00123, 0.123, 12.3])
@pytest.mark.parametrize("scenario", [*SCENARIOS.values(), GUARANTEES], ids=lambda one: one.name)
def test_tables_fit_80_columns(scenario: Scenario, value: float) -> None:
    """No heading, mode or figure is cut off, whatever its size."""
    stream = io.StringIO()

    print_scenario(Console(file=stream, width=80), scenario, made_rows(scenario, value))

    lines = stream.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert not [line for line in lines if "…" in line]
    assert sum("1 clients" in line or "16 clients" in line for line in lines) >= 2


@pytest.mark.parametrize(("goal_s", "unit"), [(5.0, "ms"), (12.0, "s")])
def test_all_times_of_a_table_have_one_unit(goal_s: float, unit: str) -> None:
    """A goal and what was measured can be compared as they stand."""
    figures: dict[str, Figure] = {"goal_s": goal_s, "p50_s": 0.25, "worst_s": 0.5, "tries": 3}

    headings, _ = table_cells(GUARANTEES, [Row(case="a stop", mode="settings", figures=figures)])

    assert [one.rpartition("\n")[2] for one in headings[1:4]] == [unit] * 3


def test_a_rate_is_no_duration() -> None:
    """Gigabytes a second stay what they are; seconds become milliseconds."""
    row = Row(case="bf16", mode="batched", figures={"weights_gb_per_s": 2.5, "tps": 9.0})

    headings, ((_, tps, rate),) = table_cells(SCENARIOS["formats"], [row])

    assert headings == ["", "tokens/s", "weights\ngb\nper\ns"]
    assert (tps, rate) == ("9.00", "2.50")


def test_the_summary_names_goals_and_notes() -> None:
    """With the scenario and the mode whose goal it is."""
    stream = io.StringIO()

    print_summary(Console(file=stream, width=200), made_report(0.2))

    lines = stream.getvalue().splitlines()
    assert "tiny, float32, mlx 1.0" in lines
    assert "sweep, single, MISSED: a figure: 0.2 x, goal at most 0.1 x" in lines
    assert lines[-1] == "note: a note"


@pytest.mark.parametrize("names", [tuple(SCENARIOS), ("sweep",), ("prefix",), ()])
def test_every_report_can_be_drawn(tmp_path: Path, names: tuple[str, ...]) -> None:
    """Whatever was measured, and nothing as well."""
    pytest.importorskip("matplotlib")
    report = made_report(0.2)
    report = msgspec.structs.replace(
        report, rows=[row for name in names for row in report.of(name)]
    )

    write_plot(report, tmp_path / "bench.png")

    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")


def test_prompts_begin_unlike_each_other() -> None:
    """The same ones for the same seed, as long as asked, with first words of their own."""
    prompts = make_prompts("seed", 40, 7)

    assert prompts == make_prompts("seed", 40, 7)
    assert prompts != make_prompts("other", 40, 7)
    assert {len(one) for one in prompts} == {7}
    assert len({one[0] for one in prompts}) == 40
    assert [one[0] for one in make_prompts("seed", 3, 2, [5, 6])].count(5) in {1, 2}
