"""Random schemas of every keyword: random answers of their grammars, whole, before ``jsonschema``."""

from __future__ import annotations

import json
import random
from decimal import InvalidOperation

import pytest
from support.clients.json_schema_cases import is_valid
from support.clients.random_schemas import random_schema, with_reference
from support.engines.fake_engine import FakeEngine

from machd.engine.grammar.grammar import LlguidanceCompiler
from machd.engine.grammar.matcher import matcher_for
from machd.errors import GrammarError
from machd.request.constraint import Constraint, ConstraintKind
from machd.request.generation import Grammar, SamplingParams

_WALKS = 4
_MAX_TOKENS = 120
_END = 256
_CLOSES = 0.35
_CLOSING = b'"}]'
_LIKES = 0.3
_LIKED = b'\\"-0.ab,'
"""Bytes at which grammars were wrong, and how often a walk prefers them."""


def _walk(grammar: Grammar, rng: random.Random) -> str | None:
    """A random answer that is allowed at each byte; None when it does not end in time."""
    matcher = matcher_for(SamplingParams(grammar=grammar))
    assert matcher is not None
    said = bytearray()
    while len(said) < _MAX_TOKENS:
        if forced := matcher.take_forced(_MAX_TOKENS):
            said += bytes(forced)
            continue
        allowed = sorted(matcher.allowed())
        assert allowed, f"a grammar that can neither go on nor end: {bytes(said)!r}"
        closes = rng.random() < _CLOSES
        if _END in allowed and (closes or len(allowed) == 1):
            return bytes(said).decode()
        choices = [one for one in allowed if one < _END]
        wanted = _CLOSING if closes else _LIKED if rng.random() < _LIKES else b""
        token_id = rng.choice([one for one in choices if one in wanted] or choices)
        matcher.accept(token_id)
        said.append(token_id)
    return None


def _wrong_answers(compiler: LlguidanceCompiler, seed: int) -> list[str]:
    """Answers that the schema does not take, unless keywords are named as ignored."""
    rng = random.Random(seed)
    schema = with_reference(rng) if rng.random() < 0.1 else random_schema(rng)
    source = json.dumps(schema)
    try:
        grammar = compiler.compile(Constraint(ConstraintKind.JSON_SCHEMA, source, "p"))
    except GrammarError:
        return []
    if grammar.ignored_keywords:
        return []
    answers = (_walk(grammar, rng) for _ in range(_WALKS))
    return [
        f"{seed}: {source} took {one}"
        for one in answers
        if one is not None and not _is_taken(one, schema)
    ]


def _is_taken(answer: str, schema: dict[str, object]) -> bool:
    try:
        return is_valid(answer, schema)
    except InvalidOperation:
        return True  # an exponent of more than 18 digits, which the judge cannot read


def _check(seeds: range) -> None:
    engine = FakeEngine()
    wrong = [one for seed in seeds for one in _wrong_answers(engine.grammars, seed)]
    engine.grammars.close()
    assert not wrong, "\n".join(wrong)


def test_random_answers_of_random_schemas_are_valid() -> None:
    """Any text of a grammar is valid under its schema, whatever the keywords."""
    _check(range(80))


@pytest.mark.longest
@pytest.mark.parametrize("first", range(80, 5080, 100))
def test_random_answers_of_five_thousand_random_schemas_are_valid(first: int) -> None:
    """The same of as many as find what is rare."""
    _check(range(first, first + 100))


def test_most_random_schemas_are_compiled_and_answered() -> None:
    """The walks above are about something: few schemas are refused or read without a keyword."""
    engine, compiled, answered = FakeEngine(), 0, 0
    for seed in range(100):
        rng = random.Random(seed)
        source = json.dumps(random_schema(rng))
        try:
            grammar = engine.grammars.compile(Constraint(ConstraintKind.JSON_SCHEMA, source, "p"))
        except GrammarError:
            continue
        compiled += not grammar.ignored_keywords
        answered += _walk(grammar, rng) is not None
    engine.grammars.close()
    assert compiled > 60
    assert answered > 60
