"""Grammars, thinking budgets and forced tokens hold whatever is drafted.

Rows follow grammars with right drafts, with drafts that the model would not sample and with drafts
that the grammar rules out, and generate what they generate without drafts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
from jsonschema import validate
from support.engines.constrained_rows import grammar_of, schema_grammar
from support.engines.drafted_scripts import DRAFT_TOKENS, constrained_differences, say
from support.engines.oracle import Oracle, WatchedEngine
from support.engines.tiny_engines import loaded
from support.engines.tiny_models import TinyKind, each_kind_and_look_ahead

from machd.engine.assembly import make_engine
from machd.engine.protocol.engine import Engine
from machd.engine.protocol.step import Lane
from machd.request.constraint import ConstraintKind
from machd.request.generation import SamplingParams, Thinking
from machd_probes.play import GREEDY, Join
from machd_probes.scripts import MIXED, random_prompt

TOKENS = 48
PERSON: dict[str, object] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 9},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "mood": {"enum": ["glad", "sad"]},
    },
    "required": ["name", "age", "mood"],
    "additionalProperties": False,
}


_Constrained = Callable[[Engine], SamplingParams]


def _schema(engine: Engine) -> SamplingParams:
    return replace(GREEDY, grammar=schema_grammar(engine, PERSON))


def _sampled_schema(engine: Engine) -> SamplingParams:
    return SamplingParams(temperature=1.2, seed=4, grammar=schema_grammar(engine, PERSON))


def _schema_with_logprobs(engine: Engine) -> SamplingParams:
    """Forced tokens are computed one by one here."""
    return replace(_schema(engine), top_logprobs=2)


def _pattern(engine: Engine) -> SamplingParams:
    """With penalties, so that the token counts of each drafted position matter."""
    grammar = grammar_of(engine, ConstraintKind.REGEX, "([a-z]{2}[0-9]){40}")
    return replace(MIXED[4], grammar=grammar)


def _thoughts(engine: Engine) -> SamplingParams:
    """Closed by force after five tokens, before an answer that is bound."""
    end = tuple(engine.tokenizer.encode("</t>", add_special_tokens=False))
    thinking = Thinking((), end, is_open=True, budget_tokens=5)
    grammar = grammar_of(engine, ConstraintKind.REGEX, "[0-9]{3} is it[.]")
    return SamplingParams(temperature=0.9, seed=3, grammar=grammar, thinking=thinking)


def _free_after_thoughts(engine: Engine) -> SamplingParams:
    """The matcher is done once the thoughts are closed."""
    end = tuple(engine.tokenizer.encode("</t>", add_special_tokens=False))
    thinking = Thinking((), end, is_open=True, budget_tokens=7)
    return replace(MIXED[3], thinking=thinking)


def _beginning(engine: Engine) -> SamplingParams:
    """The first tokens are given."""
    begin = tuple(engine.tokenizer.encode("To begin", add_special_tokens=False))
    return replace(MIXED[2], forced_token_ids=begin)


WAYS: dict[str, _Constrained] = {
    "schema": _schema,
    "sampled schema": _sampled_schema,
    "schema with log-probabilities": _schema_with_logprobs,
    "pattern with penalties": _pattern,
    "thoughts": _thoughts,
    "free after thoughts": _free_after_thoughts,
    "given beginning": _beginning,
}


def _rows(engine: Engine, lane: Lane = Lane.BATCH, tokens: int = TOKENS) -> list[Join]:
    return [
        Join(random_prompt(6 + number, number), tokens, way(engine), lane=lane)
        for number, way in enumerate(WAYS.values())
    ]


@each_kind_and_look_ahead()
def test_a_constrained_row_alone_generates_the_same(kind: TinyKind, looks_ahead: bool) -> None:  # noqa: FBT001
    """Each kind of constraint, with drafts that are always, sometimes and never right."""
    plain = make_engine(loaded(kind), looks_ahead=looks_ahead)
    oracle = Oracle({})
    engine = WatchedEngine(loaded(kind), oracle, looks_ahead=looks_ahead)
    lane = Lane.SERIAL if looks_ahead else Lane.BATCH
    for number, row in enumerate(_rows(plain, lane, TOKENS // 2)):
        expected = say(plain, [row])
        oracle.answers = {(row.prompt, row.sampling): expected.token_ids[0]}
        for right_of_ten in (10, (0, 7)[number % 2]):
            oracle.right_of_ten = right_of_ten
            engine.forget()
            said = say(engine, [row], DRAFT_TOKENS)
            assert constrained_differences(expected, said, [row]) == [], list(WAYS)[number]
            assert said.draft_faults == []
            assert engine.memory().kv_used_bytes == oracle.open_rows == 0
            if right_of_ten == 10:
                assert said.accepted_tokens > 0
                assert len(said.results) < len(expected.results)


def test_rows_with_different_grammars_verify_drafts_together() -> None:
    """In one batch with an unconstrained row, each row follows its own grammar."""
    plain = make_engine(loaded(TinyKind.STANDARD))
    oracle = Oracle({})
    engine = WatchedEngine(loaded(TinyKind.STANDARD), oracle)
    rows = [*_rows(plain), Join(random_prompt(9, 9), TOKENS, MIXED[1])]
    expected = say(plain, rows)
    oracle.answers = {
        (row.prompt, row.sampling): said for row, said in zip(rows, expected.token_ids, strict=True)
    }
    steps = []
    for right_of_ten in (0, 7, 10):
        oracle.right_of_ten = right_of_ten
        said = say(engine, rows, DRAFT_TOKENS)
        steps.append(len(said.results))
        assert constrained_differences(expected, said, rows) == []
        assert said.draft_faults == []
        text = plain.tokenizer.decode(said.token_ids[0])
        validate(json.loads(text), PERSON)
        assert re.match("([a-z]{2}[0-9]){9}", plain.tokenizer.decode(said.token_ids[3]))
    assert steps[-1] < len(expected.results)


def test_what_a_grammar_rules_out_is_not_verified() -> None:
    """A draft is cut before the first token that the grammar rules out, and costs no pass."""
    plain = make_engine(loaded(TinyKind.STANDARD))
    grammar = grammar_of(plain, ConstraintKind.REGEX, "[ab]{40}")
    row = Join(random_prompt(9, 1), 20, replace(GREEDY, grammar=grammar))
    expected = say(plain, [row])
    letters = plain.tokenizer.encode("c", add_special_tokens=False)
    oracle = Oracle({(row.prompt, row.sampling): expected.token_ids[0]})
    engine = WatchedEngine(loaded(TinyKind.STANDARD), oracle)

    oracle.answers = {(row.prompt, row.sampling): letters * 20}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "support.engines.oracle._Row.propose", lambda _self, count: tuple(letters * count)
        )
        said = say(engine, [row], DRAFT_TOKENS)

    assert constrained_differences(expected, said, [row]) == []
    assert said.accepted_tokens == engine.drafted_tokens == 0


@pytest.mark.parametrize("draft_tokens", [1, 3, 8])
def test_the_end_of_text_may_be_drafted(draft_tokens: int) -> None:
    """A row that ends inside a draft has no more tokens than without drafts; its neighbour goes on."""
    plain = make_engine(loaded(TinyKind.STANDARD))
    rows = [
        Join(random_prompt(7, 2), TOKENS, replace(GREEDY, grammar=schema_grammar(plain, PERSON))),
        Join(random_prompt(8, 3), TOKENS, MIXED[1]),
    ]
    expected = say(plain, rows)
    oracle = Oracle({})
    engine = WatchedEngine(loaded(TinyKind.STANDARD), oracle)
    oracle.answers = {
        (row.prompt, row.sampling): [*said, 0, 0]
        for row, said in zip(rows, expected.token_ids, strict=True)
    }

    said = say(engine, rows, draft_tokens)

    assert said.token_ids[0][-1] in plain.model.eos_token_ids
    assert constrained_differences(expected, said, rows) == []
    assert engine.memory().kv_used_bytes == 0


@pytest.mark.parametrize("lane", list(Lane))
def test_a_stop_token_inside_a_draft_ends_the_row_there(lane: Lane) -> None:
    """Accepted tokens behind it are dropped, and the slot's next row generates what it does alone."""
    plain = make_engine(loaded(TinyKind.STANDARD))
    row = Join(random_prompt(7, 2), 30, MIXED[4], lane=lane)
    other = Join(random_prompt(12, 3), 20, MIXED[6], lane=lane)
    expected, others = say(plain, [row]), say(plain, [other])
    oracle = Oracle(
        {
            (row.prompt, row.sampling): expected.token_ids[0],
            (other.prompt, other.sampling): others.token_ids[0],
        }
    )
    engine = WatchedEngine(loaded(TinyKind.STANDARD), oracle)
    for stop in sorted(set(expected.token_ids[0])):
        said = say(engine, [row], 6, is_end=lambda token, stop=stop: token.token_id == stop)  # type: ignore[misc]
        end = 1 + expected.token_ids[0].index(stop)
        assert said.token_ids[0] == expected.token_ids[0][:end]
        assert engine.memory().kv_used_bytes == oracle.open_rows == 0
        assert constrained_differences(others, say(engine, [other], 6), [other]) == []
