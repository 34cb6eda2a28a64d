"""The state of one row in its grammar, and in the thoughts that may come before the answer.

A matcher accepts each token of its row once, in order. Thoughts are free text that may not end the
completion; the grammar holds for the answer behind them. Where the grammar leaves one choice, the
matcher has accepted the tokens already and lists them as forced.
"""

from __future__ import annotations

from collections import deque
from copy import copy
from dataclasses import dataclass
from enum import Enum, auto
from typing import TypeAlias

import numpy as np

from machd.clock import thread_cpu_s
from machd.engine.grammar.compilation import MAX_FORCED_TOKENS
from machd.engine.grammar.grammar import compiled
from machd.engine.grammar.grammar_processes import SeparateMatcher
from machd.errors import GrammarError
from machd.request.generation import SamplingParams, Thinking

SLOW_MASK_S = 0.02
"""Processor time from which on finding a row's next tokens counts as slow; 0.1 ms is usual."""

_SLOW_BUDGET_S = 0.25
"""Slow processor time that a row may have taken: every row of the batch waits for it."""

_LONGEST_COUNTED_S = 0.05
"""What one step counts for at most. A virtual machine that its host holds up counts that as
processor time, and one such pause says nothing about the grammar."""

_FORGIVEN_S = 0.002
"""Slow time that a step of the usual length takes back, so that no long answer adds its pauses up."""

WORD_BITS = 32

MaskWords: TypeAlias = np.ndarray[tuple[int], np.dtype[np.uint32]]
"""A row's mask, [ceil(vocabulary / 32)]: bit ``i % 32`` of word ``i // 32`` allows token ``i``."""


@dataclass(slots=True)
class _SlowTime:
    """The slow time of a row and its forks."""

    spent_s: float = 0.0

    def spend(self, took_s: float) -> None:
        if took_s > SLOW_MASK_S:
            self.spent_s += min(took_s, _LONGEST_COUNTED_S)
        else:
            self.spent_s = max(0.0, self.spent_s - _FORGIVEN_S)


class _Phase(Enum):
    OPENING = auto()
    """Before the first token: thoughts or the answer may begin."""

    THINKING = auto()
    ANSWERING = auto()


def matcher_for(params: SamplingParams) -> Matcher | None:
    """Make the matcher of a new row; None for a row that may say anything."""
    has_budget = params.thinking is not None and params.thinking.budget_tokens is not None
    return Matcher(params) if params.grammar is not None or has_budget else None


class Matcher:
    """The state of one row.

    Attributes:
        forced: Tokens that have to come next, in order. They are accepted already: take them with
            :meth:`take_forced`, and do not :meth:`accept` them again.
        llmatcher: llguidance's state of the answer, behind the forced tokens; None without a grammar.
    """

    def __init__(self, params: SamplingParams) -> None:
        """Begin before the row's first token.

        Raises:
            GrammarError: The answer begins at once, and the grammar is too complex to follow.
        """
        self._thinking = params.thinking
        self._grammar = None if params.grammar is None else compiled(params.grammar)
        self.llmatcher = None if self._grammar is None else self._grammar.llmatcher.deep_copy()
        self.forced: deque[int] = deque()
        self._phase = _first_phase(params.thinking)
        marker = () if params.thinking is None else params.thinking.end_token_ids
        self._last_thoughts: deque[int] = deque(maxlen=len(marker))
        self._thought_tokens = 0
        # Shared with forks: the batch waits for them as well.
        self._slow = _SlowTime()
        if self._phase is _Phase.ANSWERING:
            self._force_next()
        elif self._phase is _Phase.THINKING:
            self._end_long_thoughts()

    def fork(self) -> Matcher:
        """Copy the state, so that accepting draft tokens leaves this matcher where it is."""
        forked = copy(self)
        forked.llmatcher = None if self.llmatcher is None else self.llmatcher.deep_copy()
        forked.forced = self.forced.copy()
        forked._last_thoughts = self._last_thoughts.copy()  # noqa: SLF001 - of the same class
        return forked

    @property
    def is_done(self) -> bool:
        """True if the row may say anything from now on, so that it needs no matcher any more."""
        return self._phase is _Phase.ANSWERING and self.llmatcher is None and not self.forced

    @property
    def needs_mask(self) -> bool:
        """True if the next token is to be chosen under a mask: none is forced, some are ruled out."""
        return self.llmatcher is not None and not self.forced

    def allows(self, token_id: int) -> bool:
        """Tell whether a token may come next."""
        if self.forced:
            return token_id == self.forced[0]
        if self.llmatcher is None or token_id == self.thought_opening:
            return True
        is_answer = self._phase is not _Phase.THINKING
        if token_id in self._eos_token_ids:
            return is_answer and self.llmatcher.is_accepting()
        return not is_answer or self.llmatcher.validate_tokens([token_id]) == 1

    def allowed(self) -> frozenset[int]:
        """List the tokens of the next mask; a batch fills :class:`machd.engine.grammar.masks.TokenMasks`.

        Raises:
            GrammarError: As of :meth:`write_mask`.
        """
        assert self._grammar is not None, "only a grammar rules anything out"
        width = self._grammar.vocabulary_tokens
        words = np.zeros(-(-width // WORD_BITS), dtype=np.uint32)
        self.write_mask(words)
        bits = np.unpackbits(words.view(np.uint8), bitorder="little")[:width]
        return frozenset(np.flatnonzero(bits).tolist())

    def accept(self, token_id: int) -> None:
        """Go on behind a token that was chosen, not forced.

        Raises:
            GrammarError: The grammar does not allow it, or has become too complex to follow.
        """
        assert not self.forced, "forced tokens come first"
        if self._phase is _Phase.OPENING:
            self._open(token_id)
        elif self._phase is _Phase.THINKING:
            self._think(token_id)
        else:
            self._answer(token_id)

    def take_forced(self, max_tokens: int) -> list[int]:
        """Remove and return the first forced tokens, at most ``max_tokens``."""
        return [self.forced.popleft() for _ in range(min(max_tokens, len(self.forced)))]

    @property
    def is_masked_by_grammar(self) -> bool:
        """True if llguidance writes the mask; inside of thoughts only the end of text is ruled out."""
        return self._phase is not _Phase.THINKING

    @property
    def is_separate(self) -> bool:
        """True if a process of its own writes the mask."""
        return isinstance(self.llmatcher, SeparateMatcher)

    @property
    def thought_opening(self) -> int | None:
        """The token that opens thoughts, which may come beside those of the grammar; None elsewhere."""
        if self._phase is not _Phase.OPENING or self._thinking is None:
            return None
        return self._thinking.start_token_ids[0]

    def write_mask(self, words: MaskWords) -> None:
        """Write the mask, and count the time it takes against the row's budget.

        Raises:
            GrammarError: The grammar has become too complex, or has held up the batch for too long.
        """
        if self.is_masked_by_grammar:
            assert self.llmatcher is not None, "only a grammar rules anything out"
            before_s = self._cpu_s()
            self.llmatcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
            self._spend(self._cpu_s() - before_s)
        self.complete_mask(words)

    def complete_mask(self, words: MaskWords) -> None:
        """Add to a mask that llguidance has written what it does not know: thoughts.

        Raises:
            GrammarError: The grammar became too complex to follow while the mask was written.
        """
        if self.llmatcher is not None and self.llmatcher.is_error():
            raise _too_complex()
        if not self.is_masked_by_grammar:
            words[:] = ~np.uint32(0)
            for token_id in self._eos_token_ids:
                words[token_id // WORD_BITS] &= ~np.uint32(1 << token_id % WORD_BITS)
        elif (opening := self.thought_opening) is not None:
            words[opening // WORD_BITS] |= np.uint32(1 << opening % WORD_BITS)

    @property
    def _eos_token_ids(self) -> frozenset[int]:
        return frozenset() if self._grammar is None else self._grammar.eos_token_ids

    def _open(self, token_id: int) -> None:
        thinking = self._thinking
        assert thinking is not None, "only thoughts have an opening"
        # A token that could begin both begins the answer.
        begins_answer = (
            self.llmatcher is not None and self.llmatcher.validate_tokens([token_id]) == 1
        )
        if token_id != thinking.start_token_ids[0] or begins_answer:
            self._phase = _Phase.ANSWERING
            self._answer(token_id)
            return
        self._phase = _Phase.THINKING
        self.forced.extend(thinking.start_token_ids[1:])
        self._end_long_thoughts()

    def _think(self, token_id: int) -> None:
        assert self._thinking is not None, "the phase is of thoughts"
        self._last_thoughts.append(token_id)
        self._thought_tokens += 1
        if tuple(self._last_thoughts) == self._thinking.end_token_ids:
            self._begin_answer()
        else:
            self._end_long_thoughts()

    def _end_long_thoughts(self) -> None:
        """Force the end of thoughts once their budget is spent."""
        assert self._thinking is not None, "the phase is of thoughts"
        budget_tokens = self._thinking.budget_tokens
        if budget_tokens is not None and self._thought_tokens >= budget_tokens:
            self.forced.extend(self._thinking.end_token_ids)
            self._begin_answer()

    def _begin_answer(self) -> None:
        self._phase = _Phase.ANSWERING
        self._force_next()

    def _answer(self, token_id: int) -> None:
        if self._grammar is None or self.llmatcher is None:
            return
        if token_id in self._eos_token_ids and self.llmatcher.is_accepting():
            return  # the end; the next plan takes the row out
        before_s = self._cpu_s()
        self._grammar.growth.tokens += 1
        if not self.llmatcher.consume_token(token_id):
            raise _too_complex()
        self._force_next()
        self._spend(self._cpu_s() - before_s)

    def _force_next(self) -> None:
        """List the tokens that the grammar leaves no choice about, and accept them."""
        if self.llmatcher is None or self.llmatcher.is_stopped():
            return
        forced = self.llmatcher.compute_ff_tokens()
        if len(forced) > MAX_FORCED_TOKENS or not self.llmatcher.consume_tokens(forced):
            raise _too_complex()
        self.forced.extend(forced)

    def _cpu_s(self) -> float:
        """Processor time of this thread, and of the grammar's own process."""
        own_s = self.llmatcher.cpu_s if isinstance(self.llmatcher, SeparateMatcher) else 0.0
        return thread_cpu_s() + own_s

    def _spend(self, took_s: float) -> None:
        self._slow.spend(took_s)
        if self._slow.spent_s > _SLOW_BUDGET_S:
            raise _too_complex()


def _first_phase(thinking: Thinking | None) -> _Phase:
    if thinking is None:
        return _Phase.ANSWERING
    if thinking.is_open:
        return _Phase.THINKING
    return _Phase.OPENING if thinking.start_token_ids else _Phase.ANSWERING


def _too_complex() -> GrammarError:
    return GrammarError(
        "the grammar became too complex to follow while the answer was generated; simplify the "
        "schema or pattern"
    )
