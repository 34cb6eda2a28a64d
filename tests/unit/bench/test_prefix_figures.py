"""What the figures of a prefix cache make of answers and of what the server said."""

from __future__ import annotations

import dataclasses

import pytest
from support.clocks.virtual_time import LoopClock, in_virtual_time
from unit.bench.bench_reports import made_timing
from unit.bench.caching_openai import TOKEN_BYTES, CachingOpenAi

from machd.bench.connection import ServerAddress
from machd.bench.level import Level, LevelTimings
from machd.bench.prefix.full_cache import FullCacheFigures, FullCacheLoad, WatchedServer
from machd.bench.prefix.kv_formats import FormatServer, formats_named, kv_format_figures
from machd.bench.prefix.latency import PrefixLatency, PrefixLatencyFigures
from machd.bench.prefix.plan import PrefixPlan
from machd.bench.prefix.prompts import WORDS, PromptSource
from machd.bench.prefix.server import CacheReading, CachingServer
from machd.bench.prefix.sharing import SharedPrompt, SharingFigures, run_sharing
from machd.bench.server import ServerProcess
from machd.bench.target import Dialect, Target
from machd.clock import SystemClock


async def found(url: str) -> CachingServer:
    """The server at a URL."""
    return await CachingServer.find(
        ServerAddress.of(url), clock=LoopClock(), on_answer=lambda: None
    )


async def shared(server: CachingOpenAi) -> SharingFigures:
    """Four users with a system prompt of 40 tokens."""
    async with server.running() as url:
        asked = await found(url)
        source = PromptSource(asked.vocabulary, seed="1")
        return await run_sharing(asked, source, SharedPrompt(users=4, system_tokens=40))


@in_virtual_time
async def test_sharing_is_told_in_what_a_server_keeps() -> None:
    """The system prompt counts once with sharing and once a user without; so do the bytes."""
    figures = await shared(CachingOpenAi())

    # Questions of 20 to 23 tokens, answers of which all but the last token is kept.
    own_tokens = 20 + 21 + 22 + 23 + 4 * 7
    assert figures.shared.added_bytes == TOKEN_BYTES * (40 + own_tokens)
    assert figures.separate.added_bytes == TOKEN_BYTES * (4 * 40 + own_tokens)
    assert figures.saved_share == pytest.approx(1 - (40 + own_tokens) / (160 + own_tokens))
    assert figures.shared.prompt_tokens == figures.separate.prompt_tokens == 4 * 40 + 86
    assert figures.separate.cached_tokens == 0
    assert figures.evictions == 0


@in_virtual_time
async def test_a_cache_without_namespaces_shows_nothing_to_save() -> None:
    """Where the second set finds the first one's prompts there is no share to be told."""
    figures = await shared(CachingOpenAi(heeds_salt=False, evicts=1))

    assert figures.separate.added_bytes == 0
    assert figures.separate.cached_tokens == figures.separate.prompt_tokens - 4
    assert figures.saved_share is None
    assert figures.evictions == 8


@in_virtual_time
async def test_a_server_without_stats_has_times_alone() -> None:
    """Nothing is made up where nothing is said."""
    figures = await shared(CachingOpenAi(has_stats=False, tells=False))

    assert figures.shared.ttft.count == figures.separate.ttft.count == 4
    assert figures.shared.cached_tokens is None
    assert (figures.saved_share, figures.bytes_saved, figures.evictions) == (None, None, None)


def test_what_the_server_says_is_what_it_says_more_than_before() -> None:
    """A cache that others use as well has bytes and blocks of theirs."""
    timings = [made_timing(0, first_s=1, gap_s=1, tokens=2)]
    readings = (
        CacheReading(bytes=1000, bytes_saved=100, shared_blocks=3, evictions=5),
        CacheReading(bytes=1200, bytes_saved=900, shared_blocks=7, evictions=5),
        CacheReading(bytes=2200, bytes_saved=900, shared_blocks=7, evictions=6),
    )

    figures = SharingFigures.of(SharedPrompt(1, 10), (timings, timings), readings)

    assert (figures.shared.added_bytes, figures.separate.added_bytes) == (200, 1000)
    assert figures.saved_share == pytest.approx(0.8)
    assert (figures.bytes_saved, figures.shared_blocks, figures.evictions) == (800, 4, 1)


async def measured_latency(server: CachingOpenAi, *, is_restarted: bool) -> PrefixLatencyFigures:
    """Four rounds, and two restarts of which each gets half of the prompts."""
    async with server.running() as url:
        asked = await found(url)
        latency = PrefixLatency(PromptSource(asked.vocabulary, seed="1"), tokens=60)
        await latency.measure(asked, 4)
        before = len(server.asked)
        for _ in range(2 * is_restarted):
            await latency.measure_restarted(asked, 2)
    later = [str(body["prompt"]) for _, body in server.asked[before:]]
    assert len(set(later)) == len(later) == 4 * is_restarted
    return latency.figures()


@in_virtual_time
async def test_times_are_medians_over_a_new_prompts() -> None:
    """Twenty new tokens take more than one and less than all; every round's prompt is new."""
    figures = await measured_latency(CachingOpenAi(word_s=0.002), is_restarted=True)

    assert (figures.rounds, figures.prompt_tokens, figures.cold.count) == (4, 60, 4)
    assert figures.cold.p50_s > 0.1
    assert figures.warm_ratio < figures.prefix_ratio < 0.7
    assert figures.restarted is not None
    assert figures.restarted.count == 4
    assert figures.restarted_ratio is not None
    assert figures.restarted_ratio < 0.5


@in_virtual_time
async def test_a_server_that_is_not_restarted_has_no_such_time() -> None:
    """A cache that keeps nothing makes known prompts as slow as new ones."""
    server = CachingOpenAi(word_s=0.002, keeps_prompts=False)
    figures = await measured_latency(server, is_restarted=False)

    assert (figures.restarted, figures.restarted_ratio) == (None, None)
    assert figures.warm_ratio > 0.7


def format_server(name: str, tokens_s: list[float], reserved_bytes: int) -> FormatServer:
    """One whose single stream made ten tokens a round, each in so many seconds."""
    target = Target(ServerAddress("h", 1, is_tls=False), None, "model", Dialect(), None)
    server = CachingServer(target, SystemClock(), WORDS, takes_salt=True, on_answer=lambda: None)
    rounds = [
        LevelTimings(
            Level(name, "kv", 1, 1), (made_timing(0, first_s=gap_s, gap_s=gap_s, tokens=10),)
        )
        for gap_s in tokens_s
    ]
    return FormatServer(name, server, rounds, reserved_bytes)


def test_formats_are_held_against_the_first_round_by_round() -> None:
    """A round in which the machine was slow is slow for both, and decides nothing."""
    figures = kv_format_figures(
        [
            format_server("none", [0.1, 0.5, 0.1], 4000),
            format_server("affine8", [0.125, 0.625, 0.1], 1600),
        ]
    )

    none, affine8 = figures
    assert (none.speed_ratio, none.rows_ratio) == (1.0, 1.0)
    assert affine8.speed_ratio == pytest.approx(0.8)
    assert affine8.rows_ratio == pytest.approx(2.5)
    assert affine8.generation_tps == pytest.approx(8.0)
    assert (affine8.completion_tokens, affine8.rounds) == (30, 3)


def test_rows_that_were_not_seen_are_not_told() -> None:
    """A server that says nothing of its reservations has no ratio."""
    unseen = format_server("none", [0.1], 0)
    (figures,) = kv_format_figures([unseen])

    assert (figures.reserved_bytes, figures.rows_ratio) == (None, None)


def test_formats_have_names() -> None:
    """Each once and in their order; another name is told with those that there are."""
    assert formats_named(["affine8", "none", "affine8"]) == ("affine8", "none")
    with pytest.raises(ValueError, match="'int8' is no format; there are: none, affine8"):
        formats_named(["none", "int8"])


def test_a_plan_counts_what_it_asks() -> None:
    """Every restart gets some prompts, and all prompts are asked for."""
    plan = PrefixPlan(sharing=SharedPrompt(users=3), rounds=5, restarts=2)

    assert plan.rounds_after_restart == 3
    assert plan.width == 3
    assert plan.remote_requests == 7 + 15 + 6
    wider = dataclasses.replace(plan, kv_formats=("none", "affine8"))
    assert (wider.width, wider.kv_requests) == (16, 96)


def test_a_full_cache_is_asked_no_longer_prompts_than_wanted() -> None:
    """Prompts too short for a judgement are fewer, and the progress bar knows it."""
    usual, short = (PrefixPlan(tokens).full_cache for tokens in (1000, 60))

    assert usual == FullCacheLoad(250)
    assert short == FullCacheLoad(60)
    assert (usual.pairs, short.pairs) == (24, 8)
    sizes = [PrefixPlan.sized(tokens, SharedPrompt()) for tokens in (500, 499)]
    assert [(plan.rounds, plan.restarts) for plan in sizes] == [(4, 2), (2, 1)]
    difference = PrefixPlan(1000).requests - PrefixPlan(60).requests
    assert difference == usual.requests - short.requests == 2 * (24 - 8)


def test_a_full_cache_costs_the_median_of_its_pairs() -> None:
    """One pair in which the machine was busy decides nothing, and shows in the quartiles."""
    asked = format_server("none", [], 0).server
    full, without = (
        WatchedServer(ServerProcess([], SystemClock()), asked, highest_bytes, rss_bytes, evictions)
        for highest_bytes, rss_bytes, evictions in ((90, 900, 7), (None, 800, None))
    )
    pairs = [(2.0, 2.0), (2.1, 2.0), (9.0, 1.0), (1.02, 1.0), (1.9, 2.0)]

    figures = FullCacheFigures.of(100, 250, pairs, full, without)

    assert figures.cost_share == pytest.approx(0.02)
    assert figures.cost_quartiles == pytest.approx((0.0, 0.05))
    assert (figures.pairs, figures.full.p50_s, figures.without.p50_s) == (5, 2.0, 2.0)
    assert (figures.highest_bytes, figures.evictions) == (90, 7)
    assert (figures.full_rss_bytes, figures.without_rss_bytes) == (900, 800)
