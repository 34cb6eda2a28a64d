"""Rows with schemas beside rows without: what is sent, and what the figures make of it."""

from __future__ import annotations

import json
from functools import partial

import pytest
from llguidance import LLMatcher
from support.clocks.virtual_time import LoopClock, in_virtual_time
from support.programs.fake_openai import FakeOpenAi
from unit.bench.bench_reports import made_timing

from machd.bench.client import CompletionClient
from machd.bench.connection import ServerAddress
from machd.bench.structured import StructuredFigures, StructuredRound, run_structured, schema_of
from machd.bench.target import Target
from machd.bench.timing import RequestTiming
from machd.bench.workload import Workload

WORKLOAD = Workload(requests=4, prompt_tokens=4, max_tokens=8, seed=1)


def answers(count: int, gap_s: float, *, tokens: int = 11) -> tuple[RequestTiming, ...]:
    """So many at once, whose first tokens take a gap, too."""
    return tuple(made_timing(0, first_s=gap_s, gap_s=gap_s, tokens=tokens) for _ in range(count))


async def measured(server: FakeOpenAi) -> StructuredFigures:
    """The scenario against a server."""
    async with server.running() as url:
        target = await Target.find(ServerAddress.of(url), clock=LoopClock())
        make_client = partial(CompletionClient, target, LoopClock())
        return await run_structured(make_client, WORKLOAD, mode="remote", on_request=lambda: None)


def test_the_ratio_is_the_median_of_the_rounds_ratios() -> None:
    """One round in which the machine was busy with something else decides nothing."""
    plain = answers(4, 0.1)
    rounds = [
        StructuredRound(plain, answers(2, gap_s), answers(2, gap_s)) for gap_s in (0.2, 0.125, 5.0)
    ]

    figures = StructuredFigures.of("continuous", rounds)

    assert figures.plain_tps == pytest.approx(4 * 11 / 1.1)
    assert figures.mixed_tps == pytest.approx(4 * 11 / 2.2)
    assert figures.ratio == pytest.approx(0.5)
    assert (figures.requests, figures.completion_tokens) == (24, 264)


def test_gaps_are_those_of_plain_answers() -> None:
    """What a schema does to its own answer's gaps is not what it does to the others'."""
    one = StructuredRound(answers(4, 0.1), answers(2, 0.2), answers(2, 7.0))

    figures = StructuredFigures.of("continuous", [one])

    assert figures.plain_itl is not None
    assert figures.mixed_itl is not None
    assert (figures.plain_itl.count, figures.mixed_itl.count) == (40, 20)
    assert figures.plain_itl.p50_s == pytest.approx(0.1)
    assert figures.mixed_itl.p99_s == pytest.approx(0.2)
    # The slow ones count for the tokens/s, whose time ends with the last token of all.
    assert figures.mixed_tps == pytest.approx(4 * 11 / 77)


def test_answers_of_one_token_have_no_gaps() -> None:
    """They are not told as gaps of no length."""
    one = StructuredRound(*(answers(2, 0.1, tokens=1) for _ in range(3)))

    figures = StructuredFigures.of("continuous", [one])

    assert (figures.plain_itl, figures.mixed_itl) == (None, None)
    assert figures.ratio == pytest.approx(2.0)


@in_virtual_time
async def test_half_of_every_second_set_has_a_schema_of_its_own() -> None:
    """Sets alternate, plain first; no schema and no prompt comes twice; no end is ignored there."""
    server = FakeOpenAi()
    figures = await measured(server)

    # The first asks what the server understands, the next sixteen warm it.
    bodies = [body for _, body in server.asked[17:]]
    assert len(bodies) == figures.requests == 96
    sets = [bodies[start : start + 16] for start in range(0, 96, 16)]
    assert [sum("guided_json" in body for body in one) for one in sets] == [0, 8] * 3
    assert all(("ignore_eos" in body) != ("guided_json" in body) for body in bodies)
    assert {body["max_tokens"] for body in bodies} == {8}
    schemas = [json.dumps(body["guided_json"]) for body in bodies if "guided_json" in body]
    assert len(set(schemas)) == len(schemas) == 24
    assert len({str(body["prompt"]) for body in bodies}) == 96


@in_virtual_time
async def test_a_server_that_slows_down_beside_schemas_shows_it() -> None:
    """Steps that take three times as long with a schema in the batch make a third of the speed."""
    figures = await measured(FakeOpenAi(step_s=0.02, schema_step_s=0.04, keeps_schemas=True))

    assert 0.2 < figures.ratio < 0.6
    assert figures.plain_itl is not None
    assert figures.mixed_itl is not None
    assert figures.mixed_itl.p50_s > 1.5 * figures.plain_itl.p50_s
    assert (figures.constrained, figures.kept) == (8, 8)


@in_virtual_time
async def test_a_server_that_ignores_schemas_shows_it() -> None:
    """Its figures look good, and its answers are none of the schemas'."""
    assert (await measured(FakeOpenAi())).kept == 0


@pytest.mark.parametrize("max_tokens", [1, 64, 4096])
def test_a_schema_has_no_answer_of_so_few_tokens(max_tokens: int) -> None:
    """The shortest text that it takes is longer than eight characters a token."""
    schema = schema_of("name", max_tokens)
    shortest = [{"name": "n" * 30, "note": "n" * 60, "count": 0}] * (max_tokens // 8 + 1)

    assert schema["minItems"] == len(shortest)
    assert len(json.dumps(shortest)) > 8 * max_tokens
    assert LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(schema), None) == ""
