"""Grammars and thoughts hold on every engine, per row, from the first token on."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest
from jsonschema import validate
from support.engines.constrained_rows import grammar_of, many_readings, run_rows, schema_grammar
from support.engines.fake_engine import FakeEngine

from machd.engine.protocol.engine import Engine
from machd.engine.protocol.step import DecodeRow, Lane, PrefillChunk, StepPlan
from machd.errors import GrammarError
from machd.request.constraint import ConstraintKind
from machd.request.generation import SamplingParams, Thinking

PERSON: dict[str, object] = {
    "type": "object",
    "properties": {
        "first_name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "mood": {"enum": ["glad", "sad"]},
    },
    "required": ["first_name", "age", "mood"],
    "additionalProperties": False,
}
FREE = SamplingParams(temperature=0.0)


@pytest.fixture(
    name="engine", params=["fake", "mlx", pytest.param("ahead", marks=pytest.mark.long)]
)
def _engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """Each engine with no rows; MLX as it is on the CPU, and looking ahead as on a GPU.

    In every run test_constrained_soak.py looks ahead.
    """
    engine: Engine = (
        FakeEngine()
        if request.param == "fake"
        else request.getfixturevalue(
            "short_engine" if request.param == "mlx" else "short_ahead_engine"
        )
    )
    yield engine
    engine.reset()


def prompt_of(engine: Engine, text: str) -> tuple[int, ...]:
    """A user's message, ready for an answer."""
    rendered = engine.tokenizer.render_chat([{"role": "user", "content": text}])
    return tuple(engine.tokenizer.encode(rendered, add_special_tokens=False))


def test_an_answer_follows_its_schema(engine: Engine) -> None:
    """Greedy or sampled, the text is JSON that the schema accepts."""
    grammar = schema_grammar(engine, PERSON)
    prompt = prompt_of(engine, "Describe a person.")
    params = [
        SamplingParams(temperature=temperature, seed=seed, grammar=grammar)
        for temperature, seed in ((0.0, 0), (1.0, 1), (1.5, 2))
    ]
    run = run_rows(engine, [prompt] * 3, params)
    assert not run.faults
    for row in range(3):
        validate(json.loads(run.text(engine, row)), PERSON)


def test_each_row_has_a_grammar_of_its_own(engine: Engine) -> None:
    """Neighbours with other grammars, or none, change nothing in a row's tokens."""
    prompts = [prompt_of(engine, text) for text in ("One?", "Two?", "Tell me about three.", "4")]
    params = [
        SamplingParams(temperature=0.0, grammar=schema_grammar(engine, PERSON)),
        SamplingParams(
            temperature=0.0, grammar=grammar_of(engine, ConstraintKind.REGEX, "[0-9]{4}-[0-9]{2}")
        ),
        FREE,
        SamplingParams(
            temperature=0.0,
            grammar=grammar_of(engine, ConstraintKind.CHOICE, '["red pepper", "green tea"]'),
        ),
    ]
    together = run_rows(engine, prompts, params, max_tokens=64)
    alone = [
        run_rows(engine, [prompt], [one], max_tokens=64)
        for prompt, one in zip(prompts, params, strict=True)
    ]
    assert together.tokens == [one.tokens[0] for one in alone]
    assert re.fullmatch("[0-9]{4}-[0-9]{2}", together.text(engine, 1))
    assert together.text(engine, 3) in ("red pepper", "green tea")


def test_a_constraint_binds_the_first_token(engine: Engine) -> None:
    """The very first token is one that the grammar allows, whatever the model would say."""
    grammar = grammar_of(engine, ConstraintKind.REGEX, "[xyz]{3}")
    run = run_rows(
        engine,
        [prompt_of(engine, "Say hello.")],
        [SamplingParams(temperature=0.0, grammar=grammar)],
    )
    assert re.fullmatch("[xyz]{3}", run.text(engine, 0))


def test_forced_tokens_take_fewer_passes_and_give_the_same(engine: Engine) -> None:
    """Tokens that a grammar leaves no choice about are not computed one by one."""
    key = "a_key_that_is_so_long_that_it_takes_many_tokens_to_write_it_down"
    schema = {
        "type": "object",
        "properties": {key: {"enum": ["yes", "no"]}},
        "required": [key],
        "additionalProperties": False,
    }
    params = SamplingParams(temperature=0.0, grammar=schema_grammar(engine, schema))
    run = run_rows(engine, [prompt_of(engine, "Well?")], [params])
    assert json.loads(run.text(engine, 0)).keys() == {key}
    assert run.steps < len(run.tokens[0]) / 2


def test_forced_tokens_stop_at_the_rows_end(engine: Engine) -> None:
    """A row never gets more tokens than it may have, forced or not."""
    schema = {"const": "word " * 30}
    params = SamplingParams(temperature=0.0, grammar=schema_grammar(engine, schema))
    prompt = prompt_of(engine, "Well?")
    chunk = PrefillChunk(
        0,
        prompt,
        0,
        is_last=True,
        sampling=params,
        reserved_tokens=len(prompt) + 7,
        lane=Lane.SERIAL,
    )
    tokens = list(engine.run(StepPlan(prefill=(chunk,))).tokens)
    while len(tokens) < 7:
        tokens += engine.run(StepPlan(decode=(DecodeRow(0),))).tokens
    assert len(tokens) == 7
    engine.run(StepPlan(release=(0,)))


def test_log_probabilities_come_with_every_token_of_a_constrained_row(engine: Engine) -> None:
    """A row that wants them gets one for each token, forced ones included."""
    params = SamplingParams(temperature=0.0, top_logprobs=1, grammar=schema_grammar(engine, PERSON))
    prompt = prompt_of(engine, "Who?")
    chunk = PrefillChunk(
        0, prompt, 0, is_last=True, sampling=params, reserved_tokens=len(prompt) + 9
    )
    tokens = list(engine.run(StepPlan(prefill=(chunk,))).tokens)
    while len(tokens) < 9:
        tokens += engine.run(StepPlan(decode=(DecodeRow(0),))).tokens
    assert all(token.logprob is not None for token in tokens)
    engine.run(StepPlan(release=(0,)))


def test_thoughts_are_free_and_the_answer_is_not(engine: Engine) -> None:
    """Inside of thoughts the grammar does not hold; their budget ends them, then it does."""
    end = tuple(engine.tokenizer.encode("</think>", add_special_tokens=False))
    thinking = Thinking((), end, is_open=True, budget_tokens=5)
    params = SamplingParams(
        temperature=0.0,
        grammar=grammar_of(engine, ConstraintKind.REGEX, "[0-9]{3}"),
        thinking=thinking,
    )
    run = run_rows(engine, [prompt_of(engine, "Count.")], [params])
    thoughts, marker, answer = run.text(engine, 0).partition("</think>")
    assert marker
    assert re.fullmatch("[0-9]{3}", answer)
    assert len(engine.tokenizer.encode(thoughts, add_special_tokens=False)) >= 3


def test_a_budget_alone_ends_thoughts(engine: Engine) -> None:
    """Without a grammar, too, thoughts are closed after so many tokens and the answer goes on."""
    end = tuple(engine.tokenizer.encode("</think>", add_special_tokens=False))
    params = SamplingParams(
        temperature=0.0, thinking=Thinking((), end, is_open=True, budget_tokens=4)
    )
    run = run_rows(engine, [prompt_of(engine, "Count.")], [params], max_tokens=40)
    text = run.text(engine, 0)
    assert text.count("</think>") == 1
    assert (
        len(engine.tokenizer.encode(text.partition("</think>")[0], add_special_tokens=False)) <= 5
    )


def test_a_hostile_pattern_fails_its_own_row_alone(engine: Engine) -> None:
    """A pattern whose states explode ends that row with a clear error; neighbours finish."""
    hostile = grammar_of(engine, ConstraintKind.REGEX, "(.*a.{12}){3}[a-z]*z{200}")
    prompts = [prompt_of(engine, "a"), prompt_of(engine, "b")]
    params = [SamplingParams(temperature=1.0, seed=1, grammar=hostile), FREE]
    run = run_rows(engine, prompts, params, max_tokens=48)
    alone = run_rows(engine, prompts[1:], params[1:], max_tokens=48)
    assert run.tokens[1] == alone.tokens[0]
    assert all(isinstance(fault, GrammarError) for fault in run.faults.values())


def test_a_row_that_holds_up_the_others_is_ended(embedded_engine: Engine) -> None:
    """A grammar whose masks take ever longer ends its row after a few of them; neighbours finish."""
    slow = grammar_of(embedded_engine, ConstraintKind.GRAMMAR, many_readings(30))
    prompts = [prompt_of(embedded_engine, "a"), prompt_of(embedded_engine, "b")]
    params = [SamplingParams(temperature=1.0, seed=1, grammar=slow), FREE]
    run = run_rows(embedded_engine, prompts, params, max_tokens=12)
    embedded_engine.reset()
    alone = run_rows(embedded_engine, prompts[1:], params[1:], max_tokens=12)
    embedded_engine.reset()
    assert isinstance(run.faults[0], GrammarError)
    assert run.tokens[1] == alone.tokens[0]


def test_penalties_and_grammars_go_together(engine: Engine) -> None:
    """A constrained row with penalties still follows its schema."""
    params = SamplingParams(
        temperature=0.8,
        seed=4,
        presence_penalty=1.0,
        repetition_penalty=1.2,
        grammar=schema_grammar(engine, PERSON),
    )
    run = run_rows(engine, [prompt_of(engine, "Describe a person.")] * 2, [params, FREE])
    validate(json.loads(run.text(engine, 0)), PERSON)
