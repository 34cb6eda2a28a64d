"""The steps of ``machd bench --prefix``: caches that work pass, and those that do not fail there."""

from __future__ import annotations

import dataclasses

import pytest
from support.clocks.virtual_time import LoopClock, in_virtual_time
from unit.bench.bench_reports import made_timing
from unit.bench.caching_openai import CachingOpenAi

from machd.bench.connection import ServerAddress
from machd.bench.prefix.prompts import PromptSource
from machd.bench.prefix.server import CachingServer
from machd.bench.prefix.steps import LIVE_STEPS, Expectation, Lookup, PrefixSteps, StepFigures
from machd.bench.timing import RequestTiming

TOKENS = 60
NAMES = ["1a", "1b", "1c", "1d", "2a", "2b", "3a"]


def found(prompt_tokens: int, cached_tokens: int | None, *, ttft_s: float = 1.0) -> RequestTiming:
    """An answer of whose prompt so much was found."""
    timing = made_timing(0, first_s=ttft_s, gap_s=0.1, tokens=4)
    return dataclasses.replace(timing, prompt_tokens=prompt_tokens, cached_tokens=cached_tokens)


async def walked(server: CachingOpenAi) -> list[StepFigures]:
    """The steps of a server that is not restarted, and as many answers as are told."""
    answered: list[None] = []
    async with server.running() as url:
        asked = await CachingServer.find(
            ServerAddress.of(url), clock=LoopClock(), on_answer=lambda: answered.append(None)
        )
        steps = PrefixSteps(PromptSource(asked.vocabulary, seed="1"), TOKENS)
        await steps.walk(asked)
    assert len(answered) == len(steps.figures)
    return steps.figures


def failed(figures: list[StepFigures]) -> list[str]:
    """Names of the steps that were not as expected."""
    return [one.step for one in figures if not one.passed]


@pytest.mark.parametrize(
    ("prompt_tokens", "cached_tokens", "lookup"),
    [
        (100, None, Lookup.UNKNOWN),
        (0, 0, Lookup.UNKNOWN),
        (100, 0, Lookup.MISS),
        (100, 1, Lookup.PREFIX_HIT),
        (100, 98, Lookup.PREFIX_HIT),
        (100, 99, Lookup.HIT),
        (100, 100, Lookup.HIT),
    ],
)
def test_what_was_found_is_what_the_server_says(
    prompt_tokens: int, cached_tokens: int | None, lookup: Lookup
) -> None:
    """All but the last token is a hit, nothing is a miss, and silence is neither."""
    assert Lookup.of(found(prompt_tokens, cached_tokens)) is lookup


@pytest.mark.parametrize(
    ("expectation", "timing", "is_met"),
    [
        (Expectation(Lookup.MISS), found(100, 1), False),
        (Expectation(Lookup.MISS, spare_share=0.1), found(100, 10), True),
        (Expectation(Lookup.MISS, spare_share=0.1), found(100, 11), False),
        (Expectation(Lookup.HIT), found(100, 98), False),
        (Expectation(Lookup.PREFIX_HIT, least_cached_tokens=90), found(100, 90), True),
        (Expectation(Lookup.PREFIX_HIT, least_cached_tokens=90), found(100, 89), False),
        # All of a prompt that has something new at its end cannot have been there.
        (Expectation(Lookup.PREFIX_HIT, least_cached_tokens=90), found(100, 99), False),
        # Nothing is told: what was found takes less than half of what a new prompt took.
        (Expectation(Lookup.HIT), found(100, None, ttft_s=0.9), True),
        (Expectation(Lookup.HIT), found(100, None, ttft_s=1.1), False),
        (Expectation(Lookup.MISS), found(100, None, ttft_s=0.9), False),
        (Expectation(Lookup.MISS), found(100, None, ttft_s=1.1), True),
    ],
)
def test_an_expectation_is_met_or_not(
    *, expectation: Expectation, timing: RequestTiming, is_met: bool
) -> None:
    """By what the server says, and by the time alone where it says nothing."""
    assert expectation.is_met(timing, 2.0) is is_met


@in_virtual_time
async def test_a_cache_that_works_passes_every_step() -> None:
    """Prompts have the lengths that were asked for, and each step finds what is there."""
    figures = await walked(CachingOpenAi())

    assert [one.step for one in figures] == NAMES
    assert len(figures) == LIVE_STEPS
    assert failed(figures) == []
    assert [one.actual for one in figures] == [one.expected for one in figures]
    assert [one.prompt_tokens for one in figures] == [60, 60, 60, 60, 80, 96, 60]
    # Of the next turn all but the answer's last token, which nobody has computed yet.
    assert [one.cached_tokens for one in figures] == [0, 59, 0, 59, 60, 75, 0]


@pytest.mark.parametrize(
    ("server", "steps"),
    [
        (CachingOpenAi(keeps_prompts=False), ["1b", "1d", "2a", "2b"]),
        (CachingOpenAi(keeps_answers=False), ["2b"]),
        (CachingOpenAi(heeds_salt=False), ["3a"]),
    ],
    ids=["forgets", "no answers", "no namespaces"],
)
@in_virtual_time
async def test_what_a_cache_does_not_do_fails_at_its_step(
    server: CachingOpenAi, steps: list[str]
) -> None:
    """Each kind of cache fails where it should have found something, or should not have."""
    assert failed(await walked(server)) == steps


@in_virtual_time
async def test_a_server_that_tells_nothing_is_judged_by_its_time() -> None:
    """Without counts the answer is unknown, and soon enough or not."""
    word_s = 0.005
    good = await walked(CachingOpenAi(tells=False, has_tokens=False, word_s=word_s))
    bad = await walked(CachingOpenAi(tells=False, keeps_prompts=False, word_s=word_s))

    assert {one.actual for one in (*good, *bad)} == {Lookup.UNKNOWN}
    assert {one.cached_tokens for one in good} == {None}
    assert failed(good) == []
    assert failed(bad) == ["1b", "1d", "2a", "2b"]


@in_virtual_time
async def test_a_server_without_salts_is_not_asked_for_them() -> None:
    """The step that needs one is left out, and no other."""
    figures = await walked(CachingOpenAi(refuses=frozenset({"cache_salt"})))

    assert [one.step for one in figures] == NAMES[:-1]
    assert failed(figures) == []


@in_virtual_time
async def test_words_are_sent_where_ids_are_not_taken() -> None:
    """Chat takes no ids: prompts are texts, and a template may be found of a new one."""
    server = CachingOpenAi(has_completions=False)
    async with server.running() as url:
        asked = await CachingServer.find(
            ServerAddress.of(url), clock=LoopClock(), on_answer=lambda: None
        )

    assert not asked.knows_lengths
    assert all(isinstance(piece, str) for piece in asked.vocabulary)
    assert asked.template_share > 0
