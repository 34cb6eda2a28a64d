"""Drafts against none, on servers whose passes are made up."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from support.clients.measured_rows import PLAN, Unseen
from support.clocks.virtual_time import LoopClock, in_virtual_time
from support.programs.speculating_openai import SpeculatingOpenAi

from machd_bench.answer import Answer
from machd_bench.bench import Bench
from machd_bench.connection import Address
from machd_bench.report import Row, Verdict
from machd_bench.scenarios.speculation import SPECULATION, Pair, TimedDecode, speculation_row
from machd_bench.server import Server


class TwoServers(Bench):
    """A bench that starts no daemon."""

    off = SpeculatingOpenAi(step_s=0.01)
    on = SpeculatingOpenAi(step_s=0.01, draft_tokens=3, right=2)

    @asynccontextmanager
    async def serve(self, *args: str) -> AsyncIterator[Server]:
        """Give the one that drafts unless it is told not to."""
        async with (self.off if "off" in args else self.on).running() as url:
            yield await Server.find(Address.of(url), LoopClock())


def decode(seconds: float, *, text: str = "same") -> TimedDecode:
    """Ten tokens, of which the first was there at once."""
    return TimedDecode(Answer(0.0, 9.0, (1.0, 1.0 + seconds), 7, 10, None, text), 1)


def row(*seconds: float, case: str = "quote") -> Row:
    """A round for each time that nine tokens took with drafts; without, they took one second."""
    pairs = [
        Pair(case, "letter", number, decode(1.0), decode(one), Counter())
        for number, one in enumerate(seconds)
    ]
    return speculation_row(case, pairs)


@in_virtual_time
async def test_both_servers_are_asked_for_every_prompt() -> None:
    """Three tokens a pass are three times as fast, once the first pass is left out."""
    bench = TwoServers(PLAN, LoopClock(), Unseen())
    rows = [one async for one in SPECULATION.run(bench)]

    assert [one.case for one in rows[:3]] == ["quote", "edit", "prose"]
    assert len(rows) == 3 + 9
    for one in rows:
        assert one.number("ratio") == pytest.approx(3.0, rel=0.1)
        assert one.figures["differ"] == 0
        # All passes verify, of the answers' 64 tokens 21 of 22 whole.
        assert one.number("accepted_share") == pytest.approx(2 / 3)
        assert one.number("tokens_per_pass") == pytest.approx(3.0, rel=0.1)
    bodies = [body for path, body in bench.on.asked if path == "/v1/chat/completions"]
    assert {body["max_tokens"] for body in bodies} == {8, PLAN.speculation_tokens}


@pytest.mark.parametrize(
    ("seconds", "verdict"),
    [
        ((0.3, 0.3, 0.3), Verdict.PASS),
        ((0.5, 0.5, 0.5), Verdict.MISSED),
        ((0.3, 0.39, 0.6), Verdict.NOT_SHOWN),
        ((0.3, 0.3), Verdict.NOT_SHOWN),
    ],
    ids=["reached", "missed", "rounds do not agree", "too few rounds"],
)
def test_a_goal_is_judged_by_rounds_that_agree(
    seconds: tuple[float, ...], verdict: Verdict
) -> None:
    """Both quartiles must be on one side of the goal, of three rounds at least."""
    (goal,) = row(*seconds).goals

    assert (goal.goal, goal.verdict) == (2.5, verdict)


def test_tokens_at_the_first_moment_count_neither_way() -> None:
    """Nine tokens in half a second are twice as fast as in one; prompts alone have no goal."""
    alone = row(0.5, case="quote letter")

    assert (alone.figures["off_tps"], alone.figures["on_tps"]) == (9.0, 18.0)
    assert (alone.figures["ratio"], alone.goals) == (2.0, [])
    assert alone.figures["accepted_share"] is None


def test_other_texts_are_counted() -> None:
    """An answer may not depend on drafts."""
    pair = Pair("quote", "letter", 0, decode(1.0), decode(1.0, text="other"), Counter())

    assert speculation_row("quote", [pair]).figures["differ"] == 1
