"""All goals of a report: ``machd bench --check`` and the ``goals`` of its JSON are made here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from machd.bench.coalescing import COALESCING_GOAL
from machd.bench.goal import Goal, Verdict
from machd.bench.long_prompt import LONG_PROMPT_GOAL
from machd.bench.modes import CONTINUOUS, STATIC, Mode
from machd.bench.prefix.figures import PrefixFigures
from machd.bench.prefix.full_cache import FULL_CACHE_GOAL
from machd.bench.prefix.kv_formats import JUDGED_FORMAT, KV_ROWS_GOAL, KV_SPEED_GOAL
from machd.bench.prefix.latency import RESTARTED_GOAL, WARM_GOAL
from machd.bench.prefix.sharing import SHARING_GOAL
from machd.bench.report import BenchReport
from machd.bench.scenarios import Scenario
from machd.bench.speculation.figures import SpeculationFigures
from machd.bench.staggered import STAGGERED_GOAL
from machd.bench.structured import STRUCTURED_GOAL


def has_goals(scenarios: Sequence[Scenario], modes: Sequence[Mode]) -> bool:
    """Return whether a run of these scenarios in these modes has a goal.

    The sweep has no goal. The one of staggered arrivals compares ``continuous`` with ``static``.
    """
    for mode in modes:
        for scenario in mode.scenarios.intersection(scenarios):
            if scenario is Scenario.STAGGERED:
                if {CONTINUOUS, STATIC} <= set(modes):
                    return True
            elif scenario is not Scenario.SWEEP:
                return True
    return False


def goals_of(report: BenchReport) -> list[Goal]:
    """Every goal that the run has a figure for, in the order of the tables."""
    goals = list(_scenario_goals(report))
    if report.speculation is not None:
        goals += _speculation_goals(report.speculation)
    goals += [one.as_goal for one in report.guarantees]
    for figures in report.prefix:
        goals += _prefix_goals(figures)
    return goals


def _scenario_goals(report: BenchReport) -> Iterable[Goal]:
    for arrivals in report.staggered:
        if arrivals.mode == CONTINUOUS.name and arrivals.static_ttft_ratio is not None:
            name = f"{arrivals.mode}, staggered: first token, times sooner than static's"
            yield Goal.at_least(name, STAGGERED_GOAL, arrivals.static_ttft_ratio)
    for joined in report.long_prompt:
        name = f"{joined.mode}, long-prompt: p99 gap meanwhile over median gap before"
        yield Goal.at_most(name, LONG_PROMPT_GOAL, joined.p99_ratio)
    for copies in report.coalescing:
        name = f"{copies.mode}, coalescing: time of {copies.copies} together over one alone"
        yield Goal.at_most(name, COALESCING_GOAL, copies.ratio)
    for mixed in report.structured:
        name = f"{mixed.mode}, structured: tokens/s of the mixed set over the plain one"
        yield Goal.at_least(name, STRUCTURED_GOAL, mixed.ratio)


def _speculation_goals(figures: SpeculationFigures) -> Iterable[Goal]:
    for one in figures.workloads:
        name = f"speculation, {one.workload.value}: tokens/s on over off"
        is_shown = one.verdict is not Verdict.NOT_SHOWN
        yield Goal.at_least(name, one.goal, one.ratio.p50, shown=is_shown)


def _prefix_goals(figures: PrefixFigures) -> Iterable[Goal]:
    def named(subject: str) -> str:
        return f"{figures.mode}, prefix: {subject}"

    passed = sum(one.passed for one in figures.steps)
    yield Goal.at_least(
        named("lookups that found what they should"), len(figures.steps), passed, "steps"
    )
    latency, sharing, full = figures.latency, figures.sharing, figures.full_cache
    is_shown = latency.is_judged
    yield Goal.at_most(
        named("first token, warm over cold"), WARM_GOAL, latency.warm_ratio, shown=is_shown
    )
    if latency.restarted_ratio is not None:
        name = named("first token, after a restart over cold")
        yield Goal.at_most(name, RESTARTED_GOAL, latency.restarted_ratio, shown=is_shown)
    if sharing is not None and sharing.saved_share is not None:
        is_shown = sharing.is_judged or sharing.saved_share >= SHARING_GOAL
        name = named("share of bytes that a shared system prompt saves")
        yield Goal.at_least(name, SHARING_GOAL, sharing.saved_share, shown=is_shown)
    if full is not None:
        is_shown = full.is_judged and full.is_goal_reached is not None
        name = named("share of time that a full cache costs")
        yield Goal.at_most(name, FULL_CACHE_GOAL, full.cost_share, shown=is_shown)
    for row in figures.kv_formats:
        if row.format == JUDGED_FORMAT:
            first = figures.kv_formats[0].format
            name = named(f"tokens/s of {row.format} over {first}")
            yield Goal.at_least(name, KV_SPEED_GOAL, row.speed_ratio)
            name = named(f"rows of {row.format} over {first} in as much memory")
            yield Goal.at_least(name, KV_ROWS_GOAL, row.rows_ratio)
