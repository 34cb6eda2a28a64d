"""Grammars made of JSON schemas, held against ``jsonschema``: no answer is ever invalid."""

from __future__ import annotations

import random

import numpy as np
import pytest
from support.clients.json_schema_cases import (
    IGNORED_ALTERNATIVES,
    IGNORED_FORMATS,
    IGNORED_KEYWORDS,
    LOOSE_CASES,
    REFUSED_SCHEMAS,
    SCHEMA_CASES,
    SchemaCase,
    is_valid,
    spelled_json,
)
from support.engines.constrained_rows import schema_grammar
from support.every_run import sampled

from machd.engine.grammar.grammar import compiled
from machd.engine.grammar.matcher import matcher_for
from machd.engine.protocol.engine import Engine
from machd.errors import GrammarError
from machd.request.generation import Grammar, SamplingParams
from machd.request.schema_bounds import UNSUPPORTED_KEYWORDS

_MAX_TOKENS = 96
_WALKS = 4
_CLOSING = ('"', "}", "]", '"}', "}}", "]}", '"]')
_CLOSES = 0.4
"""How often a walk turns to the end, where it may: what is random never ends by itself."""


def is_accepted(engine: Engine, grammar: Grammar, text: str) -> bool:
    """Return whether a text's tokens are an answer, one after the other, to the end."""
    matcher = compiled(grammar).llmatcher.deep_copy()
    return matcher.consume_tokens(_token_ids(engine, text)) and matcher.is_accepting()


def is_offered(engine: Engine, grammar: Grammar, text: str) -> bool:
    """Return whether the mask at each token lets it through, and the end at the end."""
    matcher = compiled(grammar).llmatcher.deep_copy()
    for token_id in _token_ids(engine, text):
        if not _is_in(matcher.compute_bitmask(), token_id) or not matcher.consume_token(token_id):
            return False
    return any(_is_in(matcher.compute_bitmask(), one) for one in engine.model.eos_token_ids)


def _is_in(mask: bytes, token_id: int) -> bool:
    return bool(mask[token_id // 8] >> token_id % 8 & 1)


_ENCODED: dict[str, list[int]] = {}


def _token_ids(engine: Engine, text: str) -> list[int]:
    if text not in _ENCODED:
        _ENCODED[text] = list(engine.tokenizer.encode(text, add_special_tokens=False))
        assert engine.tokenizer.decode(_ENCODED[text]) == text
    return _ENCODED[text]


@pytest.mark.parametrize("case", SCHEMA_CASES, ids=lambda case: case.name)
def test_valid_instances_are_possible_answers(embedded_engine: Engine, case: SchemaCase) -> None:
    """Every instance on the right side can be said, token by token, and is an end."""
    grammar = schema_grammar(embedded_engine, case.schema)
    for instance in case.valid:
        text = spelled_json(instance)
        assert is_valid(text, case.schema), text
        assert is_accepted(embedded_engine, grammar, text), text
        assert is_offered(embedded_engine, grammar, text), text


@pytest.mark.parametrize("case", SCHEMA_CASES, ids=lambda case: case.name)
def test_invalid_instances_are_not(embedded_engine: Engine, case: SchemaCase) -> None:
    """No instance on the wrong side can be said, nor any text that is no JSON."""
    grammar = schema_grammar(embedded_engine, case.schema)
    for instance in case.invalid:
        text = spelled_json(instance)
        assert not is_valid(text, case.schema), text
        assert not is_accepted(embedded_engine, grammar, text), text
    for text in case.invalid_texts:
        assert not is_accepted(embedded_engine, grammar, text), text


_EVERYTHING = [
    spelled_json(instance) for case in SCHEMA_CASES for instance in (*case.valid, *case.invalid)
]


@pytest.mark.parametrize(
    "case",
    sampled(
        SCHEMA_CASES,
        [case.name for case in SCHEMA_CASES[::5]],  # each has its own wrong instances above
        [case.name for case in SCHEMA_CASES],
    ),
)
def test_what_jsonschema_rejects_is_never_accepted(
    embedded_engine: Engine, case: SchemaCase
) -> None:
    """All instances of all cases: what a grammar accepts, ``jsonschema`` does, too."""
    grammar = schema_grammar(embedded_engine, case.schema)
    wrong = [
        text
        for text in dict.fromkeys(_EVERYTHING)
        if not is_valid(text, case.schema) and is_accepted(embedded_engine, grammar, text)
    ]
    assert not wrong


@pytest.fixture(name="closing", scope="module")
def _closing(embedded_engine: Engine) -> frozenset[int]:
    """Tokens that bring an answer nearer to its end."""
    encoded = [
        embedded_engine.tokenizer.encode(text, add_special_tokens=False) for text in _CLOSING
    ]
    return frozenset(one[0] for one in encoded if len(one) == 1)


def walk(
    engine: Engine, grammar: Grammar, closing: frozenset[int], rng: random.Random
) -> str | None:
    """A random answer that the matcher allows at every token; None when it does not end in time."""
    matcher = matcher_for(SamplingParams(grammar=grammar))
    assert matcher is not None
    assert matcher.llmatcher is not None
    said: list[int] = []
    while len(said) < _MAX_TOKENS:
        said += matcher.take_forced(_MAX_TOKENS)
        mask = matcher.llmatcher.compute_bitmask()
        nearer = [one for one in engine.model.eos_token_ids if _is_in(mask, one)]
        nearer = nearer or [one for one in sorted(closing) if _is_in(mask, one)]
        chosen = rng.choice(nearer) if nearer and rng.random() < _CLOSES else _any(mask, rng)
        if chosen in engine.model.eos_token_ids:
            return engine.tokenizer.decode(said)
        said.append(chosen)
        matcher.accept(chosen)
    return None


def _any(mask: bytes, rng: random.Random) -> int:
    bits = np.unpackbits(np.frombuffer(mask, dtype=np.uint8), bitorder="little")
    allowed = np.flatnonzero(bits)
    assert len(allowed), "a grammar that can neither go on nor end"
    return int(allowed[rng.randrange(len(allowed))])


@pytest.mark.parametrize("case", SCHEMA_CASES, ids=lambda case: case.name)
def test_random_answers_are_valid(
    embedded_engine: Engine, closing: frozenset[int], case: SchemaCase
) -> None:
    """Tokens drawn at random from what is allowed: an answer that ends is valid JSON of the schema."""
    grammar = schema_grammar(embedded_engine, case.schema)
    rng = random.Random(case.name)
    answers = [walk(embedded_engine, grammar, closing, rng) for _ in range(_WALKS)]
    for text in answers:
        assert text is None or is_valid(text, case.schema), text


def test_random_answers_do_end(embedded_engine: Engine, closing: frozenset[int]) -> None:
    """The walks prove something: of all schemas, most answers come to an end."""
    rng = random.Random(1)
    ended = [
        walk(embedded_engine, schema_grammar(embedded_engine, case.schema), closing, rng)
        is not None
        for case in SCHEMA_CASES
    ]
    assert sum(ended) > 0.7 * len(ended)


@pytest.mark.parametrize("keyword", IGNORED_KEYWORDS)
def test_keyword_beyond_grammars_is_named(embedded_engine: Engine, keyword: str) -> None:
    """At the root and inside, the grammar names the keyword that it ignores."""
    schema = {"type": ["object", "array", "integer"], keyword: IGNORED_KEYWORDS[keyword]}
    for one in (schema, {"type": "object", "properties": {"a": schema}}):
        assert schema_grammar(embedded_engine, one).ignored_keywords == (keyword,)


def test_every_keyword_beyond_grammars_is_known() -> None:
    """The keywords that are looked for among the compiler's warnings are those that it warns of."""
    assert sorted(IGNORED_KEYWORDS) == sorted(UNSUPPORTED_KEYWORDS)


@pytest.mark.parametrize("name", IGNORED_FORMATS)
def test_unknown_format_is_named(embedded_engine: Engine, name: str) -> None:
    """The grammar names ``format``, and never the client's own word."""
    schema = {"type": "string", "format": name}
    assert schema_grammar(embedded_engine, schema).ignored_keywords == ("format",)


@pytest.mark.parametrize("name", IGNORED_ALTERNATIVES)
def test_one_of_is_named_when_it_becomes_any_of(embedded_engine: Engine, name: str) -> None:
    """Branches that may overlap are read as ``anyOf``, and the grammar says so."""
    grammar = schema_grammar(embedded_engine, IGNORED_ALTERNATIVES[name])
    assert grammar.ignored_keywords == ("oneOf",)


@pytest.mark.parametrize("case", SCHEMA_CASES, ids=lambda case: case.name)
def test_no_keyword_of_the_supported_subset_is_ignored(
    embedded_engine: Engine, case: SchemaCase
) -> None:
    """A schema of the supported subset is followed whole."""
    assert not schema_grammar(embedded_engine, case.schema).ignored_keywords


def test_key_that_a_schema_does_not_name_is_refused(embedded_engine: Engine) -> None:
    """An object with ``properties`` alone is closed; ``additionalProperties`` opens it."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    closed = schema_grammar(embedded_engine, schema)
    opened = schema_grammar(embedded_engine, {**schema, "additionalProperties": True})
    assert not is_accepted(embedded_engine, closed, '{"a": 1, "b": 2}')
    assert is_accepted(embedded_engine, closed, '{"a": 1}')
    assert is_accepted(embedded_engine, opened, '{"a": 1, "b": 2}')


@pytest.mark.parametrize("name", REFUSED_SCHEMAS)
def test_a_schema_that_cannot_be_followed_is_refused(embedded_engine: Engine, name: str) -> None:
    """A schema that cannot be proved or satisfied is an error, not an approximation."""
    with pytest.raises(GrammarError):
        schema_grammar(embedded_engine, REFUSED_SCHEMAS[name])


@pytest.mark.parametrize("case", LOOSE_CASES, ids=lambda case: case.name)
@pytest.mark.xfail(strict=True, raises=AssertionError, reason="llguidance allows more")
def test_known_looseness_is_still_there(embedded_engine: Engine, case: SchemaCase) -> None:
    """The documented limits hold as long as these schemas fail."""
    test_invalid_instances_are_not(embedded_engine, case)
