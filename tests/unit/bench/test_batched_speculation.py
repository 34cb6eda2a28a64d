"""Drafts in a batch against none, on servers whose passes are made up."""

from __future__ import annotations

import dataclasses
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
from machd_bench.report import Figure
from machd_bench.scenarios.batched_speculation import (
    BATCHED_SPECULATION,
    STREAMS,
    Batch,
    batch_row,
)
from machd_bench.server import Server

ROUNDS = 2
TOKENS = PLAN.speculation_tokens


class TwoServers(Bench):
    """A bench that starts no daemon."""

    off = SpeculatingOpenAi(step_s=0.01)
    on = SpeculatingOpenAi(step_s=0.01, draft_tokens=3, right=2)

    @asynccontextmanager
    async def serve(self, *args: str) -> AsyncIterator[Server]:
        """Give the one that drafts unless it is told not to."""
        assert args[:3] == ("--continuous-batching", "--continuous-batching-max-b", "8")
        async with (self.off if "off" in args else self.on).running() as url:
            yield await Server.find(Address.of(url), LoopClock())


def texts_asked(server: SpeculatingOpenAi) -> list[str]:
    """The chats of full length that a server got, in their order."""
    return [str(body["messages"]) for _, body in server.asked if body["max_tokens"] == TOKENS]


@in_virtual_time
async def test_streams_run_together_with_prompts_of_their_own() -> None:
    """Three tokens a pass are three times as fast at every width, by the time of the whole load."""
    bench = TwoServers(dataclasses.replace(PLAN, speculation_rounds=ROUNDS), LoopClock(), Unseen())

    rows = [one async for one in BATCHED_SPECULATION.run(bench)]

    cases = [f"{kind}, {n} stream{'s' * (n > 1)}" for kind in ("quote", "prose") for n in STREAMS]
    assert [one.case for one in rows] == cases
    for one in rows:
        assert one.number("ratio") == pytest.approx(3.0, rel=0.1)
        # One stream makes a token in 10 ms, so these are of streams that ran at the same time.
        assert one.number("off_tps") == pytest.approx(100 * one.number("streams"), rel=0.1)
        assert (one.figures["differ"], one.figures["rounds"]) == (0, ROUNDS)
        assert one.number("accepted_share") == pytest.approx(2 / 3)
        assert one.number("tokens_per_pass") == pytest.approx(3.0, rel=0.1)
    of_round = texts_asked(bench.on)[: 2 * sum(STREAMS)]
    assert texts_asked(bench.on) == of_round * (1 + ROUNDS)
    widest = of_round[sum(STREAMS) - max(STREAMS) : sum(STREAMS)]
    assert len({text[:60] for text in widest}) == max(STREAMS)
    answers = bench.progress.answers if isinstance(bench.progress, Unseen) else 0
    assert answers == BATCHED_SPECULATION.requests(bench.plan)


def answer(begun_s: float, ended_s: float, text: str = "same") -> Answer:
    """Ten tokens between two times."""
    return Answer(begun_s, ended_s, (begun_s, ended_s), 7, 10, None, text)


def figures(*batches: Batch) -> dict[str, Figure]:
    """The figures of two streams that quote."""
    return batch_row("quote", 2, batches, None).figures


def test_a_load_is_timed_as_a_whole() -> None:
    """Twenty tokens take as long as the slower of both streams, not as both together."""
    off = (answer(0.0, 4.0), answer(0.0, 4.0))
    on = (answer(0.0, 1.0), answer(0.0, 2.0))

    found = figures(Batch(off, on, Counter()))

    assert (found["off_tps"], found["on_tps"], found["ratio"]) == (5.0, 10.0, 2.0)
    assert found["accepted_share"] is None


def test_ratios_are_of_a_rounds_own_pair() -> None:
    """A machine that is half as fast in one round has the same ratio there."""
    quick = Batch([answer(0.0, 2.0)], [answer(0.0, 1.0)], Counter())
    slow = Batch([answer(0.0, 4.0)], [answer(0.0, 2.0)], Counter())

    found = figures(quick, slow, quick)

    assert (found["p25_ratio"], found["ratio"], found["p75_ratio"]) == (2.0, 2.0, 2.0)


def test_other_texts_are_counted() -> None:
    """An answer may not depend on drafts."""
    found = figures(
        Batch([answer(0, 1), answer(0, 1)], [answer(0, 1), answer(0, 1, "x")], Counter())
    )

    assert found["differ"] == 1
