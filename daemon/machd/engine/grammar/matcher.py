"""What a row may say next: first its thoughts, then what its grammar allows.

A matcher follows its row wherever it goes. It is told every token once, in order, and is the only one
who advances the row's matcher.
"""

from __future__ import annotations

from collections import deque
from copy import copy
from dataclasses import dataclass
from enum import Enum, auto

from machd.clock import thread_cpu_s
from machd.engine.grammar.grammar import MAX_FORCED_TOKENS, compiled
from machd.engine.protocol.sampling import SamplingParams, Thinking
from machd.errors import GrammarError

SLOW_MASK_S = 0.02
"""What finding out a row's next tokens may take, in processor time; usual ones take 0.1 ms."""

_SLOW_BUDGET_S = 0.25
"""What a row may take beyond that in all, since every row of the batch waits for it."""


@dataclass(slots=True)
class _SlowTime:
    """What a row has taken beyond what is usual."""

    spent_s: float = 0.0


class _Phase(Enum):
    OPENING = auto()
    """Nothing is said yet: thoughts or the answer may begin."""

    THINKING = auto()
    ANSWERING = auto()


def matcher_for(params: SamplingParams) -> Matcher | None:
    """A fresh matcher for a row; None for one that may say anything."""
    has_budget = params.thinking is not None and params.thinking.budget_tokens is not None
    if params.grammar is None and not has_budget:
        return None
    return Matcher(params)


class Matcher:
    """One row's.

    Attributes:
        forced: Tokens that have to come next, in order; the matcher has seen them already.
    """

    def __init__(self, params: SamplingParams) -> None:
        """Begin before the first token."""
        self._thinking = params.thinking
        grammar = None if params.grammar is None else compiled(params.grammar)
        self._grammar = grammar
        self.llmatcher = None if grammar is None else grammar.matcher.deep_copy()
        self.forced: deque[int] = deque()
        self._phase = _first_phase(params.thinking)
        self._thoughts: deque[int] = deque(maxlen=_marker_tokens(params.thinking))
        self._thought_tokens = 0
        # Shared with forks: they hold up the others as much.
        self._slow = _SlowTime()
        if self._phase is _Phase.ANSWERING:
            self._force_next()
        elif self._phase is _Phase.THINKING:
            self._end_long_thoughts()

    def fork(self) -> Matcher:
        """Another that goes on from here, without changing this one."""
        forked = copy(self)
        forked.llmatcher = None if self.llmatcher is None else self.llmatcher.deep_copy()
        forked.forced = self.forced.copy()
        forked._thoughts = self._thoughts.copy()  # noqa: SLF001 - of the same class
        return forked

    def allows(self, token_id: int) -> bool:
        """Whether a token may come next."""
        if self.forced:
            return token_id == self.forced[0]
        if self.llmatcher is None or token_id == self.also_allowed:
            return True
        if token_id in self.eos_token_ids:
            return self.masks_by_matcher and self.llmatcher.is_accepting()
        return not self.masks_by_matcher or self.llmatcher.validate_tokens([token_id]) == 1

    @property
    def is_done(self) -> bool:
        """Whether the row may say anything from now on, however long it goes on."""
        return self._phase is _Phase.ANSWERING and self.llmatcher is None and not self.forced

    @property
    def needs_mask(self) -> bool:
        """Whether some tokens are out of the question now and none is forced."""
        return self.llmatcher is not None and not self.forced

    @property
    def masks_by_matcher(self) -> bool:
        """Whether it is the matcher that says which; in thoughts only the end of text is out."""
        return self._phase is not _Phase.THINKING

    @property
    def also_allowed(self) -> int | None:
        """A token beyond what the matcher allows: the one that opens thoughts."""
        if self._phase is not _Phase.OPENING or self._thinking is None:
            return None
        return self._thinking.start_token_ids[0]

    @property
    def _vocabulary_tokens(self) -> int:
        return 0 if self._grammar is None else self._grammar.vocabulary_tokens

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """What ends the text."""
        return frozenset() if self._grammar is None else self._grammar.eos_token_ids

    def allowed(self) -> frozenset[int]:
        """The tokens that may come next; a batch asks :class:`machd.engine.grammar.masks.TokenMasks`."""
        assert self.llmatcher is not None, "only a grammar rules anything out"
        if not self.masks_by_matcher:
            return frozenset(range(self._vocabulary_tokens)) - self.eos_token_ids
        mask = int.from_bytes(self.llmatcher.compute_bitmask(), "little")
        self.check()
        found = {token_id for token_id in range(mask.bit_length()) if mask >> token_id & 1}
        return frozenset(found if self.also_allowed is None else {*found, self.also_allowed})

    def fill_mask(self, address: int, size_bytes: int) -> None:
        """Write what the matcher allows, a bit a token, and count what it took.

        Raises:
            GrammarError: The row has held up the others for too long.
        """
        assert self.llmatcher is not None, "only a grammar rules anything out"
        before_s = thread_cpu_s()
        self.llmatcher.unsafe_compute_mask_ptr(address, size_bytes)
        self._spend(thread_cpu_s() - before_s)

    def take_forced(self, max_tokens: int) -> list[int]:
        """The next forced tokens; the matcher need not be told of them any more."""
        return [self.forced.popleft() for _ in range(min(max_tokens, len(self.forced)))]

    def accept(self, token_id: int) -> None:
        """A token that was chosen, not forced.

        Raises:
            GrammarError: The grammar does not allow it, or has become too complex to follow.
        """
        assert not self.forced, "what is forced comes first"
        if self._phase is _Phase.OPENING:
            self._open(token_id)
        elif self._phase is _Phase.THINKING:
            self._think(token_id)
        else:
            self._answer(token_id)

    def check(self) -> None:
        """Hold the matcher against what happened while a mask was made.

        Raises:
            GrammarError: The grammar has become too complex to follow.
        """
        if self.llmatcher is not None and self.llmatcher.is_error():
            raise _too_complex()

    def _open(self, token_id: int) -> None:
        thinking = self._thinking
        assert thinking is not None, "only thoughts have an opening"
        if token_id != thinking.start_token_ids[0] or self._may_answer_with(token_id):
            self._phase = _Phase.ANSWERING
            self._answer(token_id)
            return
        self._phase = _Phase.THINKING
        self.forced.extend(thinking.start_token_ids[1:])
        self._end_long_thoughts()

    def _may_answer_with(self, token_id: int) -> bool:
        """Whether the answer could begin so; where thoughts could, too, it is taken for the answer."""
        return self.llmatcher is not None and self.llmatcher.validate_tokens([token_id]) == 1

    def _think(self, token_id: int) -> None:
        self._thoughts.append(token_id)
        self._thought_tokens += 1
        assert self._thinking is not None, "somebody thinks"
        if tuple(self._thoughts) == self._thinking.end_token_ids:
            self._begin_answer()
        else:
            self._end_long_thoughts()

    def _end_long_thoughts(self) -> None:
        """Close the thoughts once their budget is spent."""
        assert self._thinking is not None, "somebody thinks"
        budget_tokens = self._thinking.budget_tokens
        if budget_tokens is not None and self._thought_tokens >= budget_tokens:
            self.forced.extend(self._thinking.end_token_ids)
            self._begin_answer()

    def _begin_answer(self) -> None:
        self._phase = _Phase.ANSWERING
        self._force_next()

    def _answer(self, token_id: int) -> None:
        if self.llmatcher is None:
            return
        if token_id in self.eos_token_ids and self.llmatcher.is_accepting():
            return  # the end; whoever plans the next step takes the row out
        before_s = thread_cpu_s()
        assert self._grammar is not None, "a matcher is a copy of a grammar's"
        self._grammar.growth.tokens += 1
        if not self.llmatcher.consume_token(token_id):
            raise _too_complex()
        self._force_next()
        self._spend(thread_cpu_s() - before_s)

    def _spend(self, took_s: float) -> None:
        self._slow.spent_s += took_s if took_s > SLOW_MASK_S else 0.0
        if self._slow.spent_s > _SLOW_BUDGET_S:
            raise _too_complex()

    def _force_next(self) -> None:
        """Note the tokens that the grammar leaves no choice about."""
        if self.llmatcher is None or self.llmatcher.is_stopped():
            return
        forced = self.llmatcher.compute_ff_tokens()
        if len(forced) > MAX_FORCED_TOKENS or not self.llmatcher.consume_tokens(forced):
            raise _too_complex()
        self.forced.extend(forced)


def _first_phase(thinking: Thinking | None) -> _Phase:
    if thinking is None:
        return _Phase.ANSWERING
    if thinking.is_open:
        return _Phase.THINKING
    return _Phase.OPENING if thinking.start_token_ids else _Phase.ANSWERING


def _marker_tokens(thinking: Thinking | None) -> int:
    return 0 if thinking is None else len(thinking.end_token_ids)


def _too_complex() -> GrammarError:
    return GrammarError(
        "the grammar became too complex to follow while the answer was generated; simplify the "
        "schema or pattern"
    )
