"""The compiler: accepted and refused grammars, and the ones that are kept."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from support.engines.constrained_rows import many_readings, schema_grammar
from support.engines.fake_engine import FakeEngine

from machd.engine.grammar.compilation import LIMITS, CompilationError, compile_source
from machd.engine.grammar.grammar import LlguidanceCompiler, compiled
from machd.engine.grammar.matcher import matcher_for
from machd.engine.protocol.engine import Engine
from machd.errors import GrammarError
from machd.request.constraint import Constraint, ConstraintKind
from machd.request.generation import SamplingParams
from machd.request.schema_bounds import MAX_CHOICES, MAX_DEPTH, MAX_PROPERTIES


def _deep(levels: int) -> str:
    return '{"type":"object","properties":{"a":' * levels + '{"type":"string"}' + "}}" * levels


BAD = {
    "unknown type": (ConstraintKind.JSON_SCHEMA, '{"type":"strin"}'),
    "reference to nowhere": (ConstraintKind.JSON_SCHEMA, '{"$ref":"#/$defs/none"}'),
    "reference elsewhere": (ConstraintKind.JSON_SCHEMA, '{"$ref":"https://127.0.0.1/x.json"}'),
    "reference cycle": (
        ConstraintKind.JSON_SCHEMA,
        '{"$ref":"#/$defs/a","$defs":{"a":{"$ref":"#/$defs/b"},"b":{"$ref":"#/$defs/a"}}}',
    ),
    "endless recursion": (
        ConstraintKind.JSON_SCHEMA,
        '{"type":"object","properties":{"a":{"$ref":"#"}},"required":["a"],"maxProperties":1}',
    ),
    "nothing satisfies it": (ConstraintKind.JSON_SCHEMA, "false"),
    "no schema": (ConstraintKind.JSON_SCHEMA, "[1]"),
    "no JSON": (ConstraintKind.JSON_SCHEMA, "{"),
    "too deep": (ConstraintKind.JSON_SCHEMA, _deep(MAX_DEPTH)),
    "ten thousand deep": (ConstraintKind.JSON_SCHEMA, _deep(10_000)),
    "deep in lists": (ConstraintKind.JSON_SCHEMA, '{"allOf":' + "[" * 5000 + "]" * 5000 + "}"),
    "many choices": (
        ConstraintKind.JSON_SCHEMA,
        json.dumps({"enum": [f"value {i * 7919}" for i in range(10_000)]}),
    ),
    "many properties": (
        ConstraintKind.JSON_SCHEMA,
        json.dumps({"properties": {f"p{i}": {} for i in range(10_000)}}),
    ),
    "too long": (ConstraintKind.JSON_SCHEMA, json.dumps({"title": "x" * 300_000})),
    "unclosed pattern": (ConstraintKind.REGEX, "("),
    "look-ahead": (ConstraintKind.REGEX, "(?=a)b"),
    "back reference": (ConstraintKind.REGEX, r"(a)\1"),
    "long pattern": (ConstraintKind.REGEX, "a" * 100_000),
    "no choice": (ConstraintKind.CHOICE, "[]"),
    "ten thousand choices": (ConstraintKind.CHOICE, json.dumps([f"{i}" for i in range(10_000)])),
    "unknown rule": (ConstraintKind.GRAMMAR, "start: nowhere"),
    "no grammar": (ConstraintKind.GRAMMAR, "hello, how are you"),
    "many readings": (ConstraintKind.GRAMMAR, many_readings(120)),
    "very many readings": (ConstraintKind.GRAMMAR, many_readings(1500)),
    "much that repeats": (
        ConstraintKind.GRAMMAR,
        f"start: ({' | '.join(f'x{i}' for i in range(500))})*\n"
        + "\n".join(f'x{i}: "a"?' for i in range(500)),
    ),
    "a long constant": (ConstraintKind.JSON_SCHEMA, json.dumps({"const": "x" * 5000})),
    "a control character": (ConstraintKind.JSON_SCHEMA, json.dumps({"const": "a\x01b"})),
    "options of the compiler": (
        ConstraintKind.JSON_SCHEMA,
        '{"type":"array","uniqueItems":true,"x-guidance":{"lenient":true}}',
    ),
    "a number beyond all": (ConstraintKind.JSON_SCHEMA, '{"minimum":1' + "0" * 400 + "}"),
    "a long literal": (ConstraintKind.GRAMMAR, f'start: "{"x" * 5000}"'),
    "bad GBNF": (ConstraintKind.GRAMMAR, 'root ::= "a" ('),
}


@pytest.mark.parametrize(
    ("kind", "source", "message"),
    [
        (ConstraintKind.GRAMMAR, "start: start", "no text can satisfy it"),
        (ConstraintKind.GRAMMAR, "start: A\nA: /a/ & /b/", "no text can satisfy it"),
    ],
)
def test_compiler_error_is_a_sentence_for_the_client(
    kind: ConstraintKind, source: str, message: str
) -> None:
    """No name or option of the library's is in it."""
    with pytest.raises(GrammarError) as caught:
        FakeEngine().grammars.compile(Constraint(kind, source, "p"))

    assert caught.value.message == f"p: {message}"


REFUSED_BY_THE_COMPILER = {
    "unknown type", "reference to nowhere", "reference elsewhere", "reference cycle",
    "endless recursion", "unclosed pattern", "look-ahead", "back reference", "unknown rule",
}  # fmt: skip
"""All others are beyond a bound of machd's: the compiler, which might take long over them, gets none."""


class _CountedMatcher:
    """LLMatcher's stand-in, which notes what it is made with."""

    def __init__(self) -> None:
        self.compilations: list[dict[str, Any]] = []

    def __call__(self, vocabulary: Any, source: str, **options: Any) -> LLMatcher:
        self.compilations.append(options)
        return LLMatcher(vocabulary, source, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(LLMatcher, name)


@pytest.fixture(name="compilations")
def _compilations(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The options of each compilation while a test runs."""
    counted = _CountedMatcher()
    monkeypatch.setattr("machd.engine.grammar.compilation.LLMatcher", counted)
    return counted.compilations


@pytest.mark.parametrize("name", BAD)
def test_bad_constraint_is_refused_by_a_bound_or_by_one_compilation(
    name: str, compilations: list[dict[str, Any]]
) -> None:
    """Each bad constraint gets an error that names the field; no compilation is without limits."""
    kind, source = BAD[name]
    with pytest.raises(GrammarError) as caught:
        FakeEngine().grammars.compile(Constraint(kind, source, "response_format"))
    assert caught.value.param == "response_format"
    assert caught.value.message.startswith("response_format: ")
    assert len(caught.value.message) < 700
    assert [one["limits"] for one in compilations] == [LIMITS] * (name in REFUSED_BY_THE_COMPILER)


HEAVY = {
    "properties": (
        ConstraintKind.JSON_SCHEMA,
        json.dumps({"properties": {f"p{i}": {"type": "string"} for i in range(MAX_PROPERTIES)}}),
    ),
    "choices": (ConstraintKind.CHOICE, json.dumps([f"option {i}" for i in range(MAX_CHOICES)])),
    "enum": (
        ConstraintKind.JSON_SCHEMA,
        json.dumps({"enum": [f"value {i * 7919}" for i in range(MAX_CHOICES)]}),
    ),
    "depth": (ConstraintKind.JSON_SCHEMA, _deep(MAX_DEPTH // 2)),
    "nested stars": (ConstraintKind.REGEX, "(a+)+$"),
    "exploding states": (ConstraintKind.REGEX, "(.*a){20}"),
    "counted twice": (ConstraintKind.REGEX, "(x{1,1000}){1,1000}"),
    "ambiguous": (ConstraintKind.GRAMMAR, 'start: s\ns: s s | "a" | "b" | ""'),
}


@pytest.mark.parametrize("name", HEAVY)
def test_heavy_constraint_costs_one_bounded_compilation(
    name: str, embedded_engine: Engine, compilations: list[dict[str, Any]]
) -> None:
    """The heaviest that is let through is compiled for the real vocabulary, or refused, under limits."""
    kind, source = HEAVY[name]
    with contextlib.suppress(GrammarError):
        embedded_engine.grammars.compile(Constraint(kind, source, "x"))
    assert 1 <= len(compilations) <= 2  # again if the first mask was slow
    assert all(one["limits"] == LIMITS for one in compilations)


@pytest.mark.parametrize(("pauses", "is_refused"), [(1, False), (2, True)])
def test_a_first_mask_that_is_slow_is_written_again(
    pauses: int,
    is_refused: bool,  # noqa: FBT001
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One pause of the machine refuses no grammar; a grammar that is slow each time is refused."""
    tries = count()
    now_s = 0.0

    def cpu_s() -> float:
        nonlocal now_s
        number = next(tries)
        if number % 2 == 1 and number // 2 < pauses:  # a try reads the clock before and behind
            now_s += 1.0
        return now_s

    monkeypatch.setattr("machd.engine.grammar.compilation.thread_cpu_s", cpu_s)
    engine = FakeEngine()
    vocabulary = LLTokenizer("byte")
    refusal = pytest.raises(CompilationError, match="too complex")
    with refusal if is_refused else contextlib.nullcontext():
        compile_source(
            vocabulary, LLMatcher.grammar_from_regex("[0-9]+"), engine.model.eos_token_ids
        )


def test_a_grammar_is_compiled_once() -> None:
    """The same constraint gives the same grammar, whichever field it came from."""
    compiler = FakeEngine().grammars
    first = compiler.compile(Constraint(ConstraintKind.REGEX, "[a-z]+", "guided_regex"))
    again = compiler.compile(Constraint(ConstraintKind.REGEX, "[a-z]+", "structured_outputs"))
    other = compiler.compile(Constraint(ConstraintKind.REGEX, "[a-y]+", "guided_regex"))
    assert again is first
    assert other != first


def test_a_refusal_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asking again for what cannot be compiled costs nothing."""
    compiler = FakeEngine().grammars
    bad = Constraint(ConstraintKind.REGEX, "(", "guided_regex")
    with pytest.raises(GrammarError) as first:
        compiler.compile(bad)
    monkeypatch.setattr("machd.engine.grammar.grammar.compile_source", None)
    with pytest.raises(GrammarError) as again:
        compiler.compile(bad)
    assert again.value.message == first.value.message


@pytest.mark.parametrize(
    "lark",
    [
        (
            'start: sum\nsum: product | sum "+" product | sum "-" product\n'
            'product: atom | product "*" atom\natom: /[0-9]+/ | "-" atom | "(" sum ")"'
        ),
        (
            'start: value\nvalue: object | array | STRING | "null"\n'
            'object: "{" [pair ("," pair)*] "}"\npair: STRING ":" value\n'
            'array: "[" [value ("," value)*] "]"\nSTRING: /"[^"]*"/'
        ),
        "start: "
        + " | ".join(f"x{i}" for i in range(500))
        + "\n"
        + "\n".join(f'x{i}: "k{i}"' for i in range(500)),
        'root ::= "a" root | "b"',
    ],
    ids=["sums", "json", "many ways", "gbnf"],
)
def test_common_grammar_compiles(lark: str) -> None:
    """Recursion as languages have it, and long lists without any, are within the bounds."""
    FakeEngine().grammars.compile(Constraint(ConstraintKind.GRAMMAR, lark, "guided_grammar"))


def _regex_compiler() -> Callable[[str], object]:
    compiler = FakeEngine().grammars
    return lambda pattern: compiler.compile(Constraint(ConstraintKind.REGEX, pattern, "x"))


def test_number_of_kept_grammars_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that was used longest ago goes first, so memory stays bounded."""
    monkeypatch.setattr("machd.engine.grammar.grammar._MAX_GRAMMARS", 2)
    compile_ = _regex_compiler()

    a, b = compile_("a"), compile_("b")
    assert compile_("a") is a
    compile_("c")
    assert compile_("a") is a
    assert compile_("b") is not b


def test_kept_grammars_stay_within_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Grammars used longest ago are dropped until the estimate of all kept ones fits."""
    monkeypatch.setattr("machd.engine.grammar.grammar._MAX_KEPT_BYTES", 350_000)
    compile_ = _regex_compiler()

    a, b, c = compile_("a"), compile_("b"), compile_("c")  # 100 kB each
    compile_("d")
    assert compile_("c") is c
    assert compile_("b") is b
    assert compile_("a") is not a


def test_grammar_larger_than_the_memory_for_all_is_not_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A grammar that could never fit drives no other out."""
    monkeypatch.setattr("machd.engine.grammar.grammar._MAX_KEPT_BYTES", 150_000)
    compile_ = _regex_compiler()

    a, large = compile_("a"), compile_("b" * 200)
    assert compile_("b" * 200) is not large
    assert compile_("a") is a


def test_grammar_is_compiled_again_after_many_followed_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Answers make a grammar's shared lexer states grow; compiling it anew gives their memory back."""
    monkeypatch.setattr("machd.engine.grammar.grammar._MAX_FOLLOWED_TOKENS", 3)
    compiler = FakeEngine().grammars
    constraint = Constraint(ConstraintKind.REGEX, "[ab]{9}", "x")
    grammar = compiler.compile(constraint)
    for token_id in (ord("a"), ord("b"), ord("a")):
        matcher = matcher_for(SamplingParams(grammar=grammar))
        assert matcher is not None
        matcher.accept(token_id)
        assert compiler.compile(constraint) is grammar
    matcher = matcher_for(SamplingParams(grammar=grammar))
    assert matcher is not None
    matcher.accept(ord("b"))
    assert compiler.compile(constraint) is not grammar
    matcher.accept(ord("a"))
    assert matcher.allows(ord("b")), "a row goes on with the grammar that it began with"


def test_grammar_can_be_followed_however_many_answers_came_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Lexer states that earlier answers discovered do not use up those of later ones."""
    limits = LLParserLimits(max_lexer_states=4_000, verbose_errors=False)
    monkeypatch.setattr("machd.engine.grammar.compilation.LIMITS", limits)
    compiler = FakeEngine().grammars
    constraint = Constraint(ConstraintKind.REGEX, "([ab]*a[ab]{14}){2}[ab]*c", "x")
    rng = random.Random(5)
    for _ in range(60):
        matcher = matcher_for(SamplingParams(grammar=compiler.compile(constraint)))
        assert matcher is not None
        for _ in range(100):
            matcher.allowed()
            matcher.accept(rng.choice(b"ab"))


def test_grammars_are_equal_by_what_they_say() -> None:
    """Two engines' grammars of one source compare equal, so requests can be coalesced."""
    schema = {"type": "integer"}
    one, other = (schema_grammar(FakeEngine(), schema) for _ in range(2))
    assert one == other
    assert hash(one) == hash(other)
    assert compiled(one).llmatcher is not compiled(other).llmatcher


def test_a_tokenizer_without_bytes_supports_no_grammar() -> None:
    """A constraint is refused, not ignored, if the tokens have no bytes of their own."""

    class Tokenizer(type(FakeEngine().tokenizer)):  # type: ignore[misc]
        knows_token_bytes = False

    compiler = LlguidanceCompiler(Tokenizer(), 257, frozenset({256}))
    with pytest.raises(GrammarError, match="not supported with this model"):
        compiler.compile(Constraint(ConstraintKind.JSON_OBJECT, "", "response_format"))


def test_forbidden_texts_never_occur() -> None:
    """A text that holds one of them cannot be said; one that nearly does can, to its end."""
    forbidden = json.dumps(["Paris", 'a "b/c"', "\u00fc\n"])
    grammar = FakeEngine().grammars.compile(Constraint(ConstraintKind.FORBIDDEN, forbidden, "p"))
    tokenizer = FakeEngine().tokenizer

    def is_possible(text: str) -> bool:
        matcher = compiled(grammar).llmatcher.deep_copy()
        token_ids = tokenizer.encode(text, add_special_tokens=False)
        return matcher.consume_tokens(token_ids) and matcher.is_accepting()

    for text in ("", "in Pari", 'a "b/', "\u00fc", "two\nlines"):
        assert is_possible(text)
    for text in ("in Paris", 'so a "b/c"', "\u00fc\n"):
        assert not is_possible(text)
