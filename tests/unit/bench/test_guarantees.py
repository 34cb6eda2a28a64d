"""Tries, obstacles, figures and the table of guarantees."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass, field

import msgspec
import pytest
from rich.console import Console
from support.programs.fake_openai import FakeOpenAi
from unit.bench.bench_reports import made_guarantees, made_report

from machd.bench.connection import Connection, ServerAddress
from machd.bench.goal import Verdict
from machd.bench.guarantees.bodies import (
    Body,
    bad_schemas,
    heavy_bodies,
    heavy_conversations,
    malformed_bodies,
)
from machd.bench.guarantees.figures import GuaranteeFigures
from machd.bench.guarantees.guarantee import Obstacle, measure
from machd.bench.guarantees.run import OF_REQUESTS, OF_STOPS
from machd.bench.table import ReportPrinter
from machd.clock import SystemClock
from machd.errors import EngineFaultError
from machd.settings.model import LimitsSettings

GOALS_S = {one.name: one.goal_s for one in OF_REQUESTS} | {one.name: one.goal_s for one in OF_STOPS}
MAX_BODY_BYTES: int = LimitsSettings().max_body_bytes


@dataclass
class Scripted:
    """A guarantee whose tries end as scripted."""

    ends: list[float | Obstacle]
    name: str = "scripted"
    goal_s: float = 1.0
    subjects: list[str] = field(default_factory=list)

    async def try_once(self, subject: str) -> float | Obstacle:
        """The next end."""
        self.subjects.append(subject)
        return self.ends.pop(0)


def printed(guarantees: list[GuaranteeFigures]) -> list[str]:
    """The lines of a report of nothing but guarantees."""
    nothing = ("levels", "ceilings", "staggered", "long_prompt", "coalescing", "structured")
    report = msgspec.structs.replace(
        made_report(),
        **{name: [] for name in (*nothing, "prefix", "servers")},
        speculation=None,
        guarantees=guarantees,
    )
    stream = io.StringIO()
    ReportPrinter(Console(file=stream, width=80)).finish(report)
    return [line.rstrip() for line in stream.getvalue().splitlines()]


async def test_guarantee_is_judged_by_its_worst_try() -> None:
    """Every try is made on the same subject, and one slow try misses the goal."""
    scripted = Scripted([0.2, 1.5, 0.4])
    progress: list[None] = []

    figures = await measure(scripted, "daemon", 3, on_try=lambda: progress.append(None))

    assert scripted.subjects == ["daemon"] * 3
    assert len(progress) == 3
    assert (figures.tries, figures.p50_s, figures.worst_s) == (3, 0.4, 1.5)
    assert figures.verdict is Verdict.MISSED
    assert figures.as_goal.verdict is Verdict.MISSED


async def test_guarantee_is_kept_when_its_worst_try_equals_the_goal() -> None:
    """The goal is the most that a try may take."""
    figures = await measure(Scripted([1.0]), "daemon", 1, on_try=lambda: None)

    assert figures.verdict is Verdict.PASS


async def test_guarantee_is_not_shown_when_a_try_meets_an_obstacle() -> None:
    """The obstacle ends the tries, its reason is kept, and the progress bar still fills."""
    scripted = Scripted([0.2, Obstacle("no template")])
    progress: list[None] = []

    figures = await measure(scripted, "daemon", 3, on_try=lambda: progress.append(None))

    assert len(scripted.subjects) == 2
    assert len(progress) == 3
    assert (figures.tries, figures.p50_s, figures.worst_s) == (0, None, None)
    assert (figures.verdict, figures.reason) == (Verdict.NOT_SHOWN, "no template")


@pytest.mark.parametrize("try_s", [0.0123, 12.3, 123.4])
def test_table_of_guarantees_fits_80_columns(try_s: float) -> None:
    """No name, figure or verdict of a real guarantee is cut off."""
    real = [GuaranteeFigures.of(name, goal_s, [try_s] * 3) for name, goal_s in GOALS_S.items()]
    lines = printed([*real, *made_guarantees()])

    assert max(len(line) for line in lines) <= 80
    assert not any("…" in line for line in lines)
    for one in real:
        (row,) = [line for line in lines if line.startswith(one.guarantee)]
        assert row.endswith(f"3   {one.verdict.value}")


def test_table_of_guarantees_has_goal_figures_and_reasons() -> None:
    """A row has the goal, the median and the worst try; one without figures has its reason below."""
    text = " ".join(" ".join(printed(made_guarantees())).split())

    assert "a bad body is refused 2.00 s 500 ms 500 ms 3 PASS" in text
    assert "SIGTERM ends a daemon 1.00 s 300 ms 1.20 s 3 MISSED" in text
    assert "a chat is answered 5.00 s - - 0 NOT SHOWN" in text
    assert "not measured: a chat is answered: the model has no chat template" in text


def test_json_has_figures_goals_and_verdicts_of_guarantees() -> None:
    """Each guarantee stands in ``guarantees`` with its tries and in ``goals`` with its verdict."""
    report = json.loads(msgspec.json.encode(made_report()))

    missed = report["guarantees"][1]
    assert (missed["goal_s"], missed["p50_s"], missed["worst_s"]) == (1.0, 0.3, 1.2)
    assert (missed["verdict"], missed["reason"]) == ("MISSED", None)
    (goal,) = [one for one in report["goals"] if one["name"] == missed["guarantee"]]
    assert goal == {
        "name": "SIGTERM ends a daemon",
        "bound": "at most",
        "goal": 1.0,
        "unit": "s",
        "figure": 1.2,
        "verdict": "MISSED",
    }


def test_guarantees_have_different_names() -> None:
    """A name in the table, the JSON and the check belongs to one guarantee."""
    assert len(GOALS_S) == len(OF_REQUESTS) + len(OF_STOPS)


def test_heavy_bodies_are_nearly_as_large_as_a_body_may_be() -> None:
    """Each one is read whole by a daemon of default settings, which is what makes it heavy."""
    for body in heavy_bodies("m") + heavy_conversations("m"):
        assert 0.7 * MAX_BODY_BYTES < len(body.data) <= MAX_BODY_BYTES, body.name


def test_bad_schemas_are_json_but_for_their_meaning() -> None:
    """A schema is refused for itself: the body around it is a valid request."""
    for body in bad_schemas("m"):
        fields, _, constraint = body.data.partition(b', "guided_')
        request = msgspec.json.decode(fields + b"}", type=dict[str, object])
        assert request.keys() == {"model", "prompt", "max_tokens"}, body.name
        assert constraint.startswith((b'json": {', b'regex": "', b'grammar": "')), body.name
        assert b"guided_" not in constraint, body.name


@pytest.mark.parametrize("status_is_allowed", [True, False])
async def test_body_that_is_accepted_ends_the_bench_unless_that_is_allowed(
    *, status_is_allowed: bool
) -> None:
    """A server that answers 200 to a malformed body is a fault, not a quick refusal."""
    data = json.dumps({"model": "first", "prompt": "a", "max_tokens": 2}).encode()
    allowed = frozenset({200}) if status_is_allowed else frozenset({400})
    body = Body("a good body", "/v1/completions", data, allowed)
    clock = SystemClock()
    async with FakeOpenAi().running() as url:
        connection = Connection(ServerAddress.of(url), api_key=None, clock=clock)
        try:
            if status_is_allowed:
                assert await body.send(connection, clock) > 0
            else:
                with pytest.raises(EngineFaultError, match="a good body: HTTP 200"):
                    await body.send(connection, clock)
        finally:
            await connection.aclose()


def test_malformed_bodies_have_different_names_and_bytes() -> None:
    """Each one shows another mistake."""
    bodies = malformed_bodies("m")

    assert len({one.name for one in bodies}) == len({one.data for one in bodies}) == len(bodies)
