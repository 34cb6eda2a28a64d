"""Constraints compiled for a model's vocabulary, by llguidance.

A compiled grammar stays at its beginning: each row takes a copy of its state, which costs
microseconds. Compiling holds no lock of Python's, so streams go on meanwhile.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from llguidance.gbnf_to_lark import any_to_lark

from machd.clock import thread_cpu_s
from machd.engine.protocol.tokenizer import Tokenizer
from machd.errors import GrammarError
from machd.panics import PanicError, panics_as_errors
from machd.request.bounded_schema import bounded_schema
from machd.request.constraint import Constraint, ConstraintKind
from machd.request.generation import Grammar
from machd.request.grammar_bounds import check_recursion
from machd.request.schema_bounds import UNSUPPORTED_KEYWORDS, check_constraint, read_choices

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions  # there for type checkers only

_MAX_GRAMMARS = 256
_MAX_KEPT_BYTES = 64_000_000
"""Estimated memory of the compiled grammars that are kept, together."""

_MAX_FOLLOWED_TOKENS = 400
"""Tokens of answers after which a kept grammar is compiled again when it is next asked for. The
states of its rows share lexer states, which only grow: with ``minLength`` 3000 there are 20,000 after
1,800 tokens, and from then on every row of the grammar fails."""

_BASE_BYTES = 100_000
_CHARACTER_BYTES = 300
_TOKEN_BYTES = 10_000
"""Estimates for a grammar, a character of its source and a token of an answer. Measured: 40 to 170 kB,
30 to 330 bytes, and up to 11 kB."""

_MAX_REFUSED_CHARACTERS = 65_536
_MAX_REFUSALS = 64
"""Refused constraints that are remembered, so that a repeated request costs nothing."""

MAX_FORCED_TOKENS = 8192
"""Forced tokens in a row. A recursion that cannot end would force tokens for ever."""

_LIMITS = LLParserLimits(
    # The work of one mask, beside the time that matchers measure: with llguidance's own limits a
    # pattern of 12 characters took 0.4 s for one.
    step_max_items=10_000,
    step_lexer_fuel=40_000,
    max_lexer_states=20_000,  # 1 to 2 kB each
    verbose_errors=False,  # its errors would quote the text
)

_MAX_FIRST_S = 0.05
"""Processor time of the first mask; that of a schema with 1,000 properties takes 0.01."""

_MAX_MESSAGE_CHARACTERS = 600

_STOP_REASONS = {
    "NoExtension": "no text can satisfy it",
    "NoExtensionBias": "no text can satisfy it",
    "LexerTooComplex": "too complex to be followed in time",
    "ParserTooComplex": "too complex to be followed in time",
}
_WARNINGS = {
    "format": "Unknown format: ",
    "oneOf": "oneOf not fully supported",
    **{keyword: f'"{keyword}"' for keyword in UNSUPPORTED_KEYWORDS},
}
"""Keyword of a JSON schema to llguidance's warning that it is ignored."""

_JSON_STYLE: JsonCompileOptions = {
    # Python's own style, which models have seen most. With one style only, keys and punctuation are
    # forced tokens.
    "whitespace_flexible": False,
    "key_separator": ": ",
    "item_separator": ", ",
    # llguidance knows a property by its plain spelling alone: spelled with \\u escapes its value
    # would get around the property's schema.
    "json_allowed_escapes": 'nrbtf\\"',
    # A keyword that a grammar cannot express is a warning then; see `_ignored_keywords`.
    "lenient": True,
}

_FORBIDDING = """start: TEXT
TEXT: ANY & ~(ANY FORBIDDEN ANY)
ANY: /(?s:.*)/
FORBIDDEN: {texts}
"""
"""Lark of any text that holds none of the given texts."""


@dataclass(slots=True)
class GrammarGrowth:
    """The tokens that all rows of a grammar have accepted. Changed by the engine thread alone."""

    tokens: int = 0


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """A grammar bound to a vocabulary.

    Attributes:
        llmatcher: llguidance's state at the beginning of a text; copy it, do not advance it.
        eos_token_ids: Tokens that end a text once the grammar allows its end.
        vocabulary_tokens: Width of the logits.
    """

    llmatcher: LLMatcher
    eos_token_ids: frozenset[int]
    vocabulary_tokens: int
    growth: GrammarGrowth = field(default_factory=GrammarGrowth)


def compiled(grammar: Grammar) -> CompiledGrammar:
    """Unwrap the part of a grammar that only this room knows."""
    assert isinstance(grammar.compiled, CompiledGrammar), "grammars come from the engine's compiler"
    return grammar.compiled


class LlguidanceCompiler:
    """Compiles for one vocabulary, and keeps the grammars used last. Threads may share it."""

    def __init__(
        self, tokenizer: Tokenizer, vocabulary_tokens: int, eos_token_ids: frozenset[int]
    ) -> None:
        """Begin without grammars; the vocabulary is read when it is first needed.

        ``vocabulary_tokens`` is the width of the logits.
        """
        self._tokenizer = tokenizer
        self._vocabulary_tokens = vocabulary_tokens
        self._eos_token_ids = frozenset(one for one in eos_token_ids if one < vocabulary_tokens)
        self._lock = threading.Lock()
        self._vocabulary: LLTokenizer | None = None
        self._kept: OrderedDict[tuple[ConstraintKind, str], Grammar] = OrderedDict()
        self._refused: OrderedDict[Constraint, str] = OrderedDict()

    def compile(self, constraint: Constraint) -> Grammar:
        """Compile a constraint for the vocabulary, or return the grammar that is kept of it.

        Raises:
            GrammarError: It cannot be compiled, nothing satisfies it, it is beyond the limits, or
                the model's tokens have no bytes of their own.
        """
        kept = self._find(constraint)
        if kept is not None:
            return kept
        try:
            check_constraint(constraint)
            grammar = self._compiled(constraint)
        except GrammarError as error:
            self._remember_refusal(constraint, error)
            raise
        self._keep(constraint, grammar)
        return grammar

    def _compiled(self, constraint: Constraint) -> Grammar:
        # A panic over the vocabulary is the model's fault, any other panic the constraint's.
        vocabulary = self._tokens(constraint.param)
        try:
            with panics_as_errors("llguidance"):
                source = _SOURCES[constraint.kind](constraint)
                made = self._compile(source, constraint.param, vocabulary)
                return Grammar(source, made, _ignored_keywords(made.llmatcher))
        except PanicError as panic:
            raise GrammarError(
                f"{constraint.param}: the compiler fails on it", param=constraint.param
            ) from panic

    def _find(self, constraint: Constraint) -> Grammar | None:
        with self._lock:
            refusal = self._refused.get(constraint)
            if refusal is not None:
                raise GrammarError(refusal, param=constraint.param)
            grammar = self._kept.pop(_key(constraint), None)
            if grammar is None or compiled(grammar).growth.tokens > _MAX_FOLLOWED_TOKENS:
                return None
            self._kept[_key(constraint)] = grammar
            return grammar

    def _keep(self, constraint: Constraint, grammar: Grammar) -> None:
        if _estimated_bytes(constraint.source, grammar) > _MAX_KEPT_BYTES:
            return
        with self._lock:
            if _key(constraint) in self._kept:
                return  # another thread compiled it meanwhile
            self._kept[_key(constraint)] = grammar
            kept_bytes = sum(
                _estimated_bytes(source, one) for (_, source), one in self._kept.items()
            )
            while len(self._kept) > _MAX_GRAMMARS or kept_bytes > _MAX_KEPT_BYTES:
                (_, source), dropped = self._kept.popitem(last=False)
                kept_bytes -= _estimated_bytes(source, dropped)

    def _remember_refusal(self, constraint: Constraint, error: GrammarError) -> None:
        if len(constraint.source) > _MAX_REFUSED_CHARACTERS:
            return  # too long to keep; its length is refused quickly
        with self._lock:
            self._refused[constraint] = error.message
            while len(self._refused) > _MAX_REFUSALS:
                self._refused.popitem(last=False)

    def _compile(self, source: str, param: str, vocabulary: LLTokenizer) -> CompiledGrammar:
        matcher = LLMatcher(vocabulary, source, log_level=0, limits=_LIMITS)
        self._check(matcher, param)
        # The first mask builds most of what later ones need; and some mistakes show only here.
        before_s = thread_cpu_s()
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        forced = matcher.deep_copy().compute_ff_tokens()
        took_s = thread_cpu_s() - before_s
        self._check(matcher, param)
        ends = sum(1 << one for one in self._eos_token_ids)
        if not mask & ~ends and not matcher.is_accepting():
            raise GrammarError(f"{param}: no text can satisfy it", param=param)
        if len(forced) > MAX_FORCED_TOKENS:
            raise GrammarError(
                f"{param}: it begins with more than {MAX_FORCED_TOKENS} tokens that are always the "
                "same, or never ends",
                param=param,
            )
        if took_s > _MAX_FIRST_S:
            raise GrammarError(f"{param}: too complex to be followed in time", param=param)
        return CompiledGrammar(matcher, self._eos_token_ids, self._vocabulary_tokens)

    def _check(self, matcher: LLMatcher, param: str) -> None:
        if matcher.is_error():
            raise GrammarError(f"{param}: {_sentence(matcher.get_error())}", param=param)

    def _tokens(self, param: str) -> LLTokenizer:
        with self._lock:
            if self._vocabulary is None:
                if not self._tokenizer.knows_token_bytes or not self._eos_token_ids:
                    raise GrammarError(
                        f"{param}: not supported with this model: its tokenizer does not tell what "
                        "its tokens stand for",
                        param=param,
                    )
                size, ends = self._vocabulary_tokens, sorted(self._eos_token_ids)
                with panics_as_errors("llguidance"):
                    wrapper = TokenizerWrapper(_Vocabulary(self._tokenizer, size, ends[0]))
                    self._vocabulary = LLTokenizer(wrapper, n_vocab=size, eos_token=ends)
            return self._vocabulary


class _Vocabulary:
    """A tokenizer as llguidance reads it."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, size: int, eos_token_id: int) -> None:
        self.eos_token_id = eos_token_id
        named = min(size, tokenizer.vocabulary_tokens)
        # Logits may be wider than the vocabulary: a token without bytes is never allowed.
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(named)]
        self.tokens += [b""] * (size - named)
        self.special_token_ids = [one for one in tokenizer.special_token_ids if one < size]
        self._tokenizer = tokenizer

    def __call__(self, text: bytes | str) -> list[int]:
        decoded = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        return self._tokenizer.encode(decoded, add_special_tokens=False)


def _estimated_bytes(source: str, grammar: Grammar) -> int:
    """Estimate the memory of a kept grammar as far as it has grown."""
    grown_bytes = _TOKEN_BYTES * compiled(grammar).growth.tokens
    return _BASE_BYTES + _CHARACTER_BYTES * len(source) + grown_bytes


def _sentence(error: str) -> str:
    """Put an error of llguidance into words for a client."""
    text = " ".join(error.split())
    if "panic" in text or "<backtrace>" in text:
        return "too large for the compiler"
    reason, mark, _ = text.partition("<non-verbose/>")
    if mark:
        # llguidance gives the name of its stop reason alone.
        return _STOP_REASONS.get(reason.strip(" :"), "it cannot be followed")
    return text[:_MAX_MESSAGE_CHARACTERS]


def _key(constraint: Constraint) -> tuple[ConstraintKind, str]:
    return constraint.kind, constraint.source


def _json_object(_constraint: Constraint) -> str:
    return LLMatcher.grammar_from_json_schema({"type": "object"}, overrides=_JSON_STYLE)


def _json_schema(constraint: Constraint) -> str:
    schema = json.loads(constraint.source)
    # A boolean schema has no objects to close.
    closed = json.dumps(bounded_schema(schema)) if isinstance(schema, dict) else constraint.source
    try:
        return LLMatcher.grammar_from_json_schema(closed, overrides=_JSON_STYLE)
    except ValueError as error:
        # A number that llguidance's parser does not read.
        raise GrammarError(f"{constraint.param}: {error}", param=constraint.param) from error


def _ignored_keywords(matcher: LLMatcher) -> tuple[str, ...]:
    """List the keywords of a schema that the grammar does not enforce."""
    warnings = "\n".join(matcher.get_grammar_warnings())
    return tuple(keyword for keyword, words in _WARNINGS.items() if words in warnings)


def _choice(constraint: Constraint) -> str:
    return LLMatcher.grammar_from_lark(f"start: {_alternatives(constraint)}")


def _forbidden(constraint: Constraint) -> str:
    return LLMatcher.grammar_from_lark(_FORBIDDING.format(texts=_alternatives(constraint)))


def _alternatives(constraint: Constraint) -> str:
    # In Lark a text is written as in JSON.
    return " | ".join(json.dumps(one, ensure_ascii=False) for one in read_choices(constraint))


def _grammar(constraint: Constraint) -> str:
    try:
        lark = any_to_lark(constraint.source)
    except Exception as error:  # the converter raises exceptions of any kind
        raise GrammarError(
            f"{constraint.param}: it is neither Lark nor GBNF: {error}", param=constraint.param
        ) from error
    check_recursion(lark, param=constraint.param)
    return LLMatcher.grammar_from_lark(lark)


_SOURCES: dict[ConstraintKind, Callable[[Constraint], str]] = {
    ConstraintKind.JSON_OBJECT: _json_object,
    ConstraintKind.JSON_SCHEMA: _json_schema,
    ConstraintKind.REGEX: lambda constraint: LLMatcher.grammar_from_regex(constraint.source),
    ConstraintKind.CHOICE: _choice,
    ConstraintKind.FORBIDDEN: _forbidden,
    ConstraintKind.CALLS: lambda constraint: LLMatcher.grammar_from_lark(constraint.source),
    ConstraintKind.GRAMMAR: _grammar,
}
