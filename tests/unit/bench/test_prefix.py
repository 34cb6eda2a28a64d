"""The prefix cache as a bench sees it: caches that work pass, and those that do not fail there."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.clients.measured_rows import PLAN, rows_of
from support.clocks.virtual_time import in_virtual_time
from support.programs.caching_openai import TOKEN_BYTES, CachingOpenAi

from machd_bench.answer import Answer
from machd_bench.report import Row, Verdict
from machd_bench.scenarios.lookup import Lookup, is_met
from machd_bench.scenarios.prefix import PREFIX
from machd_bench.scenarios.sharing import SHARING

STEPS = ["1a", "1b", "1c", "1d", "2a", "2b", "3a"]


def found(prompt_tokens: int, cached_tokens: int | None, ttft_s: float = 1.0) -> Answer:
    """An answer of whose prompt so much was found."""
    return Answer(0.0, 9.0, (ttft_s,), prompt_tokens, 4, cached_tokens)


def failed(rows: list[Row]) -> list[str]:
    """Names of the steps that were not as expected."""
    return [row.case[:2] for row in rows if row.figures.get("verdict") == "MISSED"]


@pytest.mark.parametrize(
    ("expected", "answer", "met"),
    [
        (Lookup.MISS, found(100, 1), False),
        (Lookup.MISS, found(100, 0), True),
        (Lookup.HIT, found(100, 98), False),
        (Lookup.HIT, found(100, 99), True),
        (Lookup.PREFIX_HIT, found(100, 90), True),
        (Lookup.PREFIX_HIT, found(100, 89), False),
        # All of a prompt that has something new at its end cannot have been there.
        (Lookup.PREFIX_HIT, found(100, 99), False),
        # Nothing is told: what was found takes less than half of what a new prompt took.
        (Lookup.HIT, found(100, None, 0.9), True),
        (Lookup.HIT, found(100, None, 1.1), False),
        (Lookup.MISS, found(100, None, 0.9), False),
        (Lookup.MISS, found(100, None, 1.1), True),
    ],
)
def test_an_expectation_is_met_or_not(*, expected: Lookup, answer: Answer, met: bool) -> None:
    """By what the server says, and by the time alone where it says nothing."""
    assert is_met(expected, 90, answer, 2.0, is_chat=False) is met


def test_a_chats_template_may_be_found_of_a_new_prompt() -> None:
    """A tenth of it is no hit."""
    assert is_met(Lookup.MISS, 0, found(100, 10), 2.0, is_chat=True)
    assert not is_met(Lookup.MISS, 0, found(100, 11), 2.0, is_chat=True)


@in_virtual_time
async def test_a_cache_that_works_passes_every_step() -> None:
    """Prompts have the lengths that were asked for, and each step finds what is there."""
    rows = await rows_of(PREFIX, CachingOpenAi())

    steps, times = rows[:7], rows[7:]
    assert [row.case[:2] for row in steps] == STEPS
    assert failed(rows) == []
    assert [row.figures["prompt_tokens"] for row in steps] == [60, 60, 60, 60, 80, 96, 60]
    # Of the next turn all but the answer's last token, which nobody has computed yet.
    assert [row.figures["cached_tokens"] for row in steps] == [0, 59, 0, 59, 60, 75, 0]
    assert [row.case for row in times] == ["cold", "warm", "prefix"]
    # Of 60 tokens one, or 20, are read anew; so short a prompt is not judged.
    assert [row.number("ratio") for row in times] == pytest.approx([1, 1 / 60, 1 / 3], abs=0.05)
    assert [goal.verdict for row in times for goal in row.goals] == [Verdict.NOT_SHOWN]
    assert [goal.verdict for row in steps for goal in row.goals] == [Verdict.PASS]


@pytest.mark.parametrize(
    ("server", "steps"),
    [
        (CachingOpenAi(keeps_prompts=False), ["1b", "1d", "2a", "2b"]),
        (CachingOpenAi(keeps_answers=False), ["2b"]),
        (CachingOpenAi(heeds_salt=False), ["3a"]),
        (CachingOpenAi(tells=False, keeps_prompts=False, word_s=0.005), ["1b", "1d", "2a", "2b"]),
        (CachingOpenAi(tells=False, has_tokens=False, word_s=0.005), []),
        (CachingOpenAi(refuses=frozenset({"cache_salt"})), []),
    ],
    ids=["forgets", "no answers", "no namespaces", "forgets in silence", "silent", "no salt"],
)
@in_virtual_time
async def test_what_a_cache_does_not_do_fails_at_its_step(
    server: CachingOpenAi, steps: list[str]
) -> None:
    """Each kind of cache fails where it should have found something, or should not have."""
    rows = await rows_of(PREFIX, server)

    assert failed(rows) == steps
    assert any(row.case.startswith("3a") for row in rows) == (not server.refuses)


@pytest.mark.parametrize("heeds_salt", [True, False])
@in_virtual_time
async def test_sharing_saves_what_is_kept_once(*, heeds_salt: bool) -> None:
    """In namespaces of their own each user's prompt is kept whole."""
    plan = replace(PLAN, users=5, system_tokens=500)
    shared, separate, *saved = await rows_of(SHARING, CachingOpenAi(heeds_salt=heeds_salt), plan)

    questions = sum(20 + user + 7 for user in range(5))
    assert shared.figures["added_bytes"] == (500 + questions) * TOKEN_BYTES
    assert separate.figures["added_bytes"] == (2500 + questions) * TOKEN_BYTES * heeds_salt
    if heeds_salt:
        assert saved[0].number("saved_share") == pytest.approx(2000 / (2500 + questions))
    assert len(saved) == heeds_salt


@in_virtual_time
async def test_a_server_without_salts_has_no_figures_of_sharing() -> None:
    """Without namespaces nothing can be compared."""
    assert await rows_of(SHARING, CachingOpenAi(refuses=frozenset({"cache_salt"}))) == []
