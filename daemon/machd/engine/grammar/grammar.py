"""Constraints compiled for a model's vocabulary, by llguidance.

A compiled grammar stays at its beginning: each row takes a copy of its state, which costs
microseconds. Compiling holds no lock of Python's, so streams go on meanwhile. Grammars whose time
llguidance does not bound are kept apart, each in a process that can be ended.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from llguidance import LLMatcher, LLTokenizer

from machd.engine.grammar.compilation import CompilationError, compile_source, ignored_keywords
from machd.engine.grammar.grammar_processes import (
    CompilationStoppedError,
    GrammarBounds,
    GrammarProcesses,
    SeparateMatcher,
)
from machd.engine.grammar.grammar_source import given_up_keywords, grammar_source
from machd.engine.grammar.vocabulary import Vocabulary
from machd.engine.protocol.tokenizer import Tokenizer
from machd.errors import GrammarError
from machd.panics import PanicError, panics_as_errors
from machd.request.constraint import Constraint, ConstraintKind
from machd.request.generation import Grammar
from machd.request.intersections import has_unbounded_cost
from machd.request.schema_bounds import check_constraint

_MAX_GRAMMARS = 256
_MAX_KEPT_BYTES = 64_000_000
"""Estimated memory of the compiled grammars that are kept, together."""

_MAX_KEPT_PROCESSES = 4
"""Kept grammars that have a process of their own."""

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


@dataclass(slots=True)
class GrammarGrowth:
    """The tokens that all rows of a grammar have accepted. Changed by the engine thread alone."""

    tokens: int = 0


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """A grammar bound to a vocabulary.

    Attributes:
        llmatcher: llguidance's state at the beginning of a text, here or in a process of its own;
            copy it, do not advance it.
    """

    llmatcher: LLMatcher | SeparateMatcher
    eos_token_ids: frozenset[int]
    vocabulary_tokens: int
    growth: GrammarGrowth = field(default_factory=GrammarGrowth)

    @property
    def is_usable(self) -> bool:
        """False once it has grown too much for another row, or its process has ended."""
        has_ended = isinstance(self.llmatcher, SeparateMatcher) and not self.llmatcher.is_alive()
        return self.growth.tokens <= _MAX_FOLLOWED_TOKENS and not has_ended


def compiled(grammar: Grammar) -> CompiledGrammar:
    """Unwrap the part of a grammar that only this room knows."""
    assert isinstance(grammar.compiled, CompiledGrammar), "grammars come from the engine's compiler"
    return grammar.compiled


class LlguidanceCompiler:
    """Compiles for one vocabulary, and keeps the grammars used last. Threads may share it."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocabulary_tokens: int,
        eos_token_ids: frozenset[int],
        bounds: GrammarBounds | None = None,
    ) -> None:
        """Begin without grammars; the vocabulary is read when it is first needed."""
        self._tokenizer = tokenizer
        self._vocabulary_tokens = vocabulary_tokens
        self._eos_token_ids = frozenset(one for one in eos_token_ids if one < vocabulary_tokens)
        self._bounds = bounds or GrammarBounds()
        self._lock = threading.Lock()
        self._vocabulary: LLTokenizer | None = None
        self._processes: GrammarProcesses | None = None
        self._kept: OrderedDict[tuple[ConstraintKind, str], Grammar] = OrderedDict()
        self._refused: OrderedDict[Constraint, str] = OrderedDict()

    @property
    def process_count(self) -> int:
        """Number of processes that compile or follow a grammar."""
        return 0 if self._processes is None else self._processes.open_count

    def is_separate(self, constraint: Constraint) -> bool:
        """Tell whether compiling a constraint may take long, and needs a process of its own."""
        with self._lock:
            if _key(constraint) in self._kept or constraint in self._refused:
                return False
        check_constraint(constraint)
        return has_unbounded_cost(constraint)

    def compile(
        self, constraint: Constraint, *, is_wanted: Callable[[], bool] = lambda: True
    ) -> Grammar:
        """Compile a constraint for the vocabulary, or return the grammar that is kept of it."""
        kept = self._find(constraint)
        if kept is not None:
            return kept
        param = constraint.param
        try:
            check_constraint(constraint)
            grammar = self._compiled(constraint, is_wanted)
        except CompilationError as error:
            refusal = GrammarError(f"{param}: {error}", param=param)
            if not isinstance(error, CompilationStoppedError):  # on a less busy machine it may do
                self._remember_refusal(constraint, refusal)
            raise refusal from error
        except GrammarError as error:
            self._remember_refusal(constraint, error)
            raise
        self._keep(constraint, grammar)
        return grammar

    def close(self) -> None:
        """End the processes of grammars."""
        if self._processes is not None:
            self._processes.close()

    def _compiled(self, constraint: Constraint, is_wanted: Callable[[], bool]) -> Grammar:
        # A panic over the vocabulary is the model's fault, any other panic the constraint's.
        vocabulary, processes = self._tokens(constraint.param)
        try:
            with panics_as_errors("llguidance"):
                source = grammar_source(constraint)
                matcher: LLMatcher | SeparateMatcher
                if has_unbounded_cost(constraint):
                    if processes.open_count >= self._bounds.max_processes:
                        with self._lock:
                            self._drop_separate(0)
                    matcher, warnings = processes.compile(source, is_wanted)
                else:
                    matcher = compile_source(vocabulary, source, self._eos_token_ids)
                    warnings = matcher.get_grammar_warnings()
        except PanicError as panic:
            raise GrammarError(
                f"{constraint.param}: the compiler fails on it", param=constraint.param
            ) from panic
        made = CompiledGrammar(matcher, self._eos_token_ids, self._vocabulary_tokens)
        ignored = given_up_keywords(constraint) | ignored_keywords(warnings, source)
        return Grammar(source, constraint, made, tuple(sorted(ignored)))

    def _find(self, constraint: Constraint) -> Grammar | None:
        with self._lock:
            refusal = self._refused.get(constraint)
            if refusal is not None:
                raise GrammarError(refusal, param=constraint.param)
            grammar = self._kept.pop(_key(constraint), None)
            if grammar is None or not compiled(grammar).is_usable:
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
            self._drop_separate(_MAX_KEPT_PROCESSES)
            while len(self._kept) > _MAX_GRAMMARS or kept_bytes > _MAX_KEPT_BYTES:
                (_, source), dropped = self._kept.popitem(last=False)
                kept_bytes -= _estimated_bytes(source, dropped)

    def _drop_separate(self, max_kept: int) -> None:
        """Drop the grammars with processes that were used longest ago; the lock is held."""
        separate = [
            key
            for key, one in self._kept.items()
            if isinstance(compiled(one).llmatcher, SeparateMatcher)
        ]
        for key in separate[: max(0, len(separate) - max_kept)]:
            del self._kept[key]

    def _remember_refusal(self, constraint: Constraint, error: GrammarError) -> None:
        if len(constraint.source) > _MAX_REFUSED_CHARACTERS:
            return  # too long to keep; its length is refused quickly
        with self._lock:
            self._refused[constraint] = error.message
            while len(self._refused) > _MAX_REFUSALS:
                self._refused.popitem(last=False)

    def _tokens(self, param: str) -> tuple[LLTokenizer, GrammarProcesses]:
        """Read the vocabulary, for this process and for those of grammars."""
        with self._lock:
            if self._vocabulary is None or self._processes is None:
                if not self._tokenizer.knows_token_bytes or not self._eos_token_ids:
                    raise GrammarError(
                        f"{param}: not supported with this model: its tokenizer does not tell what "
                        "its tokens stand for",
                        param=param,
                    )
                encode = partial(self._tokenizer.encode, add_special_tokens=False)
                vocabulary = Vocabulary.of(
                    self._tokenizer, self._vocabulary_tokens, self._eos_token_ids
                )
                with panics_as_errors("llguidance"):
                    self._vocabulary = vocabulary.bound(encode)
                self._processes = GrammarProcesses(vocabulary, encode, self._bounds)
            return self._vocabulary, self._processes


def _estimated_bytes(source: str, grammar: Grammar) -> int:
    """Estimate the memory of a kept grammar as far as it has grown."""
    grown_bytes = _TOKEN_BYTES * compiled(grammar).growth.tokens
    return _BASE_BYTES + _CHARACTER_BYTES * len(source) + grown_bytes


def _key(constraint: Constraint) -> tuple[ConstraintKind, str]:
    return constraint.kind, constraint.source
