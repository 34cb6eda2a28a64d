"""Staggered arrivals, a long prompt and identical requests, against a server whose tempo is made up."""

from __future__ import annotations

from functools import partial

import pytest
from support.clocks.virtual_time import LoopClock, in_virtual_time
from support.programs.fake_openai import FakeOpenAi
from unit.bench.bench_reports import made_timing

from machd.bench.client import CompletionClient
from machd.bench.coalescing import run_coalescing
from machd.bench.connection import ServerAddress
from machd.bench.long_prompt import LongPromptFigures, LongPromptLoad, run_long_prompt
from machd.bench.staggered import Arrivals, StaggeredTimings, run_staggered, staggered_figures
from machd.bench.target import Target
from machd.bench.workload import Workload
from machd.errors import EngineFaultError

CLOCK = LoopClock()
WORKLOAD = Workload(requests=4, prompt_tokens=4, max_tokens=8, seed=1)
LOAD = LongPromptLoad(streams=3, prompt_tokens=100, settle_tokens=8, max_tokens=400)


async def find(url: str) -> Target:
    """Get to know the server."""
    return await Target.find(ServerAddress.of(url), clock=CLOCK)


@in_virtual_time
async def test_staggered_requests_arrive_while_others_are_answered() -> None:
    """They are sent the interval apart, whatever the server is at."""
    server = FakeOpenAi(step_s=0.03)
    arrivals = Arrivals(streams=3, interval_s=0.05, rounds=2)
    ended: list[None] = []
    async with server.running() as url:
        make_client = partial(CompletionClient, await find(url), CLOCK)
        timings = await run_staggered(
            make_client, WORKLOAD, arrivals, on_request=lambda: ended.append(None)
        )

    assert len(timings) == len(ended) == arrivals.requests == 6
    first, second, third = sorted(one.sent_s for one in timings)[:3]
    assert second - first == pytest.approx(0.05)
    assert third - second == pytest.approx(0.05)
    assert second < max(one.ended_s for one in timings[:3])
    prompts = [body["prompt"] for _, body in server.asked[1:]]
    assert len(set(prompts)) == 6


def test_the_staggered_ratio_is_statics_median_over_the_modes() -> None:
    """Above 1 a mode's first token is sooner; without static batching there is no ratio."""

    def timings(mode: str, first_s: float) -> StaggeredTimings:
        return StaggeredTimings(
            mode, tuple(made_timing(0, first_s=first_s, gap_s=0.1, tokens=2) for _ in range(4))
        )

    measured = [timings("static", 6.0), timings("continuous", 0.5)]

    static, continuous = staggered_figures(measured, Arrivals(), static="static")
    (alone,) = staggered_figures(measured[1:], Arrivals(), static="static")

    assert (static.static_ttft_ratio, continuous.static_ttft_ratio) == (1.0, 12.0)
    assert continuous.ttft.p50_s == 0.5
    assert alone.static_ttft_ratio is None


def test_a_gap_counts_when_it_touches_the_long_prompts_time() -> None:
    """Gaps before are those of the full set of streams; meanwhile none is lost, and silence counts."""
    regular = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 9.0, 10.0]
    late = [2.5, 3.5, 4.5]
    joined = made_timing(5.5, first_s=3.0, gap_s=0.5, tokens=4)

    figures = LongPromptFigures.of("continuous", [regular, late], joined, ended_s=10.5)

    # From 2.5 on all run: 3-4, 4-5, 2.5-3.5 and 3.5-4.5. The prompt has its first token at 8.5.
    assert figures.before.count == 4
    assert figures.before.p50_s == 1.0
    # 5-9 of the first stream; the second was silent from 4.5 until it was cut off.
    assert figures.during.count == 2
    assert figures.during.mean_s == pytest.approx((4.0 + 6.0) / 2)
    assert figures.p99_ratio == pytest.approx(4.0 + 0.99 * 2.0)
    assert figures.ttft_s == 3.0


@in_virtual_time
async def test_a_server_that_stalls_its_streams_shows_it() -> None:
    """The p99 of the gaps meanwhile holds the prompt's whole prefill, and the ratio tells."""
    stalling = FakeOpenAi(step_s=0.005, word_s=0.002, stalls=True)
    async with stalling.running() as url:
        make_client = partial(CompletionClient, await find(url), CLOCK)
        figures = await run_long_prompt(make_client, WORKLOAD, LOAD, mode="remote")

    assert figures.during.p99_s > 0.1
    assert figures.p99_ratio > 2
    assert figures.prompt_tokens == 100
    assert figures.ttft_s > 0.19


@in_virtual_time
async def test_a_server_that_keeps_streaming_shows_it() -> None:
    """Where the prompt is read beside the streams, their gaps stay what they were."""
    server = FakeOpenAi(step_s=0.01, word_s=0.001)
    async with server.running() as url:
        make_client = partial(CompletionClient, await find(url), CLOCK)
        figures = await run_long_prompt(make_client, WORKLOAD, LOAD, mode="remote")

    assert figures.streams == 3
    assert figures.during.p50_s == pytest.approx(figures.before.p50_s)
    assert figures.ttft_s > 0.09
    # Streams are cut off once all is known: nobody waits for their 400 tokens.
    assert figures.before.count < 3 * 100


@in_virtual_time
async def test_streams_that_end_too_early_are_no_measurement() -> None:
    """A server that stops at an end of text, or runs fewer streams, fails aloud, not flatteringly."""
    async with FakeOpenAi(max_tokens=5).running() as url:
        make_client = partial(CompletionClient, await find(url), CLOCK)
        with pytest.raises(EngineFaultError, match="a stream ended before the long prompt"):
            await run_long_prompt(make_client, WORKLOAD, LOAD, mode="remote")


@pytest.mark.parametrize(("coalesces", "copies"), [(True, 2), (False, 0)])
@in_virtual_time
async def test_copies_are_counted_by_what_the_server_says(*, coalesces: bool, copies: int) -> None:
    """Two of three identical requests follow the first where the server lets them."""
    server = FakeOpenAi(step_s=0.01, coalesces=coalesces)
    async with server.running() as url:
        make_client = partial(CompletionClient, await find(url), CLOCK)
        figures = await run_coalescing(
            make_client, WORKLOAD, mode="remote", on_request=lambda: None
        )

    assert figures.coalesced == copies
    assert figures.copies == 3
    assert figures.ratio == pytest.approx(figures.together_s / figures.alone_s)
    assert figures.alone_s > 0.06
    prompts = [str(body["prompt"]) for _, body in server.asked[1:]]
    # Of a round: one alone, then three alike, which are not the one.
    assert len(set(prompts[:4])) == 2
    assert len(set(prompts)) == 6
