"""Each scenario against a server whose tempo is made up."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from llguidance import LLMatcher
from support.clients.measured_rows import PLAN, rows_of
from support.clocks.virtual_time import LoopClock, in_virtual_time
from support.programs.fake_openai import FakeOpenAi

from machd.errors import EngineFaultError
from machd_bench.answer import Answer
from machd_bench.connection import Address
from machd_bench.report import Verdict
from machd_bench.scenarios.coalescing import COALESCING
from machd_bench.scenarios.long_prompt import LONG_PROMPT, row_of
from machd_bench.scenarios.staggered import INTERVAL_S, STAGGERED
from machd_bench.scenarios.structured import STRUCTURED, format_of
from machd_bench.scenarios.sweep import SWEEP
from machd_bench.server import Dialect, Server


async def find(server: FakeOpenAi, **hints: object) -> Server:
    """Get to know a server."""
    async with server.running() as url:
        return await Server.find(Address.of(url), LoopClock(), **hints)  # type: ignore[arg-type]


@in_virtual_time
async def test_a_server_that_knows_less_is_asked_for_less() -> None:
    """Without completions and without ignore_eos, chat without it is found."""
    server = FakeOpenAi(has_completions=False, refuses=frozenset({"ignore_eos"}))
    found = await find(server)

    assert (found.model_id, found.capabilities) == ("first", None)
    assert found.dialect == Dialect(is_chat=True, ignores_eos=False)
    asked = [(path, "ignore_eos" in body, "stream_options" in body) for path, body in server.asked]
    completions, chat = "/v1/completions", "/v1/chat/completions"
    assert asked == [
        *((completions, True, True), (completions, False, True), (completions, False, False)),
        *((chat, True, True), (chat, False, True)),
    ]


@in_virtual_time
async def test_a_person_may_name_the_model_and_more_fields() -> None:
    """Both are in every request, over what the bench sends by itself."""
    server = FakeOpenAi()
    await find(server, model_id="second", extra={"logit_bias": {"2": -100}, "temperature": 0.5})

    ((_, body),) = server.asked
    assert (body["model"], body["temperature"]) == ("second", 0.5)
    assert body["logit_bias"] == {"2": -100}


@pytest.mark.parametrize(
    "server",
    [FakeOpenAi(), FakeOpenAi(sends_usage=False), FakeOpenAi(refuses=frozenset({"ignore_eos"}))],
    ids=["usage", "silent", "refused"],
)
@in_virtual_time
async def test_the_sweep_counts_every_request_and_token(server: FakeOpenAi) -> None:
    """At every level, by usage where it is sent, and by events with text where it is not."""
    rows = await rows_of(SWEEP, server, replace(PLAN, requests=3, concurrencies=(1, 4)))

    assert [(row.case, row.figures["requests"]) for row in rows] == [
        ("1 client", 3),
        ("4 clients", 4),
    ]
    assert [row.figures["completion_tokens"] for row in rows] == [24, 32]
    assert [row.number("gap_p50_s") for row in rows] == pytest.approx([0.002, 0.002])
    assert all(row.figures["batch_width"] is None for row in rows)
    assert "ceiling_share" not in rows[0].figures


@in_virtual_time
async def test_staggered_requests_arrive_while_others_are_answered() -> None:
    """The next one is sent an interval later, whatever the server is at."""
    server = FakeOpenAi(step_s=0.1)
    (row,) = await rows_of(STAGGERED, server)

    # Four of 8 steps of 0.1 s each, one every 0.25 s: a server that waits would take longer.
    assert row.figures["requests"] == 8
    assert row.number("latency_p99_s") == pytest.approx(0.8)
    assert row.number("ttft_p99_s") < INTERVAL_S
    assert not row.goals


def test_a_gap_counts_when_it_touches_the_long_prompts_time() -> None:
    """Gaps before are those of the full set of streams; meanwhile none is lost, and silence counts."""
    regular = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 9.0, 10.0]
    late = [2.5, 3.5, 4.5]

    row = row_of([regular, late], Answer(5.5, 10.5, (8.5, 9.0), prompt_tokens=100))

    # From 2.5 on all run: 3-4, 4-5, 2.5-3.5 and 3.5-4.5. The prompt has its first token at 8.5.
    assert row.figures["before_gap_p50_s"] == 1.0
    # 5-9 of the first stream; the second was silent from 4.5 until it was cut off.
    assert row.number("during_gap_p50_s") == pytest.approx((4.0 + 6.0) / 2)
    assert row.number("p99_ratio") == pytest.approx(4.0 + 0.99 * 2.0)
    assert row.figures["ttft_s"] == 3.0


@pytest.mark.parametrize("stalls", [True, False])
@in_virtual_time
async def test_a_server_that_stalls_its_streams_shows_it(*, stalls: bool) -> None:
    """The p99 of the gaps meanwhile holds the prompt's whole prefill, or stays what it was."""
    (row,) = await rows_of(LONG_PROMPT, FakeOpenAi(step_s=0.01, word_s=0.002, stalls=stalls))

    assert (row.figures["streams"], row.figures["prompt_tokens"]) == (8, 100)
    assert row.number("ttft_s") > 0.19
    assert (row.number("p99_ratio") > 10) is stalls
    # Streams are cut off once all is known: nobody waits for their 768 tokens.
    assert len(row.samples["gap_s"]) < 8 * 200


@in_virtual_time
async def test_streams_that_end_too_early_are_no_measurement() -> None:
    """A server that stops at an end of text, or runs fewer streams, fails aloud, not flatteringly."""
    with pytest.raises(EngineFaultError, match="a stream ended before the long prompt"):
        await rows_of(LONG_PROMPT, FakeOpenAi(max_tokens=5))


@pytest.mark.parametrize(("coalesces", "copies"), [(True, 2), (False, 0)])
@in_virtual_time
async def test_copies_are_counted_by_what_the_server_says(*, coalesces: bool, copies: int) -> None:
    """Two of three identical requests follow the first where the server lets them."""
    server = FakeOpenAi(step_s=0.01, coalesces=coalesces)
    (row,) = await rows_of(COALESCING, server)

    assert (row.figures["coalesced"], row.figures["copies"]) == (copies, 3)
    assert row.number("ratio") == pytest.approx(1.0, abs=0.1)
    prompts = [str(body["prompt"]) for _, body in server.asked[1:]]
    # Of a round: one alone, then three alike, which are not the one.
    assert len(set(prompts[:4])) == 2
    assert len(set(prompts)) == 6


@in_virtual_time
async def test_half_of_every_second_set_has_a_format_of_its_own() -> None:
    """Sets alternate, plain first; no schema and no prompt comes twice; no end is ignored there."""
    server = FakeOpenAi()
    (row,) = await rows_of(STRUCTURED, server)

    # The first asks what the server understands, the next sixteen warm it.
    bodies = [body for _, body in server.asked[17:]]
    assert len(bodies) == row.figures["requests"] == 96
    sets = [bodies[start : start + 16] for start in range(0, 96, 16)]
    assert [sum("response_format" in body for body in one) for one in sets] == [0, 8] * 3
    assert all(("ignore_eos" in body) != ("response_format" in body) for body in bodies)
    schemas = [json.dumps(body["response_format"]) for body in bodies if "response_format" in body]
    assert len(set(schemas)) == len(schemas) == 24
    assert len({str(body["prompt"]) for body in bodies}) == 96
    # A server that ignores schemas looks fast, and its answers are none of theirs.
    assert (row.figures["kept"], row.figures["completion_tokens"]) == (0, 96 * 8)
    assert row.goals[0].verdict is Verdict.NOT_SHOWN


@in_virtual_time
async def test_a_server_that_slows_down_beside_schemas_shows_it() -> None:
    """Steps that take three times as long with a schema in the batch make a third of the speed."""
    server = FakeOpenAi(step_s=0.02, schema_step_s=0.04, keeps_schemas=True)
    (row,) = await rows_of(STRUCTURED, server)

    assert 0.2 < row.number("ratio") < 0.6
    assert row.number("beside_gap_p50_s") > 1.5 * row.number("plain_gap_p50_s")
    assert row.figures["kept"] == 8


@pytest.mark.parametrize("max_tokens", [1, 64, 4096])
def test_a_schema_has_no_answer_of_so_few_tokens(max_tokens: int) -> None:
    """The shortest text that it takes is longer than eight characters a token."""
    schema = format_of("name", max_tokens)["json_schema"]["schema"]  # type: ignore[index]
    shortest = [{"name": "n" * 30, "note": "n" * 60, "count": 0}] * (max_tokens // 8 + 1)

    assert schema["minItems"] == len(shortest)
    assert len(json.dumps(shortest)) > 8 * max_tokens
    assert LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(schema), None) == ""
