"""The learnt duration of a step, from which the pace follows.

A step of so many decoding rows takes a base time, for one token of each row, and more for every token beyond:

    seconds = base + prompt tokens x seconds of each + tokens ahead of every row x seconds of each

Each of the three is the median of the newest steps that tell it, so one slow step moves none. The base is that of
plain steps, of which one is asked for now and then; a step without decoding rows has none. A prompt token costs
more the more tokens it attends to, so its cost is learnt for each class of contexts.
Durations come in; there is no clock here.
"""

from __future__ import annotations

from collections import deque
from math import inf
from statistics import median_low

_SAMPLES = 9
"""Newest steps whose median counts: durations off by a tenth make it off by a twentieth."""

_MIN_PLAIN_STEPS = 3
"""Plain steps before the base is known: the fewest whose median leaves a slow one out."""

_MAX_UNMEASURED_STEPS = 32
"""Steps in a row without a plain one. A step of 8 rows takes 87 ms over 150 tokens each and 116 ms over 150 to 600."""

_PASS_TOKENS = 20
"""Prior: the base of one row is that of 20 tokens, 52 ms against 2.6 ms on two cores."""

_PATIENCE_STEPS = 400
"""Plain steps after which the cost of tokens ahead is forgotten: two tries in so many cost a machine where drafts never
pay 1 % at most."""

_SHORT_CONTEXT_TOKENS = 512
"""Tokens of the shortest class of contexts; each further one is as long as all before it. A prompt token takes 2.5 ms
without a context and 12 ms over 5,000 tokens."""


class TokenCost:
    """Learnt seconds that one more token adds to a step.

    Attributes:
        longest_tokens: Most tokens of a measured step.
    """

    __slots__ = ("_samples_s", "longest_tokens")

    def __init__(self, *prior_s: float, longest_tokens: int = 0) -> None:
        """Begin with a prior that counts as one measurement, or without any."""
        self._samples_s = deque(prior_s, maxlen=_SAMPLES)
        self.longest_tokens = longest_tokens

    @property
    def seconds(self) -> float | None:
        """Seconds of one token; None before a measurement."""
        return median_low(self._samples_s) if self._samples_s else None

    def tokens_in(self, more_s: float) -> float:
        """Tokens that make a step longer by ``more_s``: any number before a measurement, or where they cost nothing."""
        return more_s / self.seconds if self.seconds else inf

    def observe(self, tokens: int, more_s: float) -> None:
        """Take in a step that so many tokens made longer by ``more_s``."""
        self._samples_s.append(max(0.0, more_s) / tokens)
        self.longest_tokens = max(self.longest_tokens, tokens)


class StepCost:
    """Learnt duration of steps in which one number of rows decodes.

    Attributes:
        ahead: Cost of one token ahead of every row. The prior counts as its first measurement, so that a slow step does
            not end drafts.
    """

    __slots__ = ("_plain_s", "_prompt", "_rows", "_unmeasured_steps", "_unused_steps", "ahead")

    def __init__(self, rows: int) -> None:
        """Begin without measurements; a step without rows has no base to measure."""
        self._rows = rows
        self._plain_s: deque[float] = deque(maxlen=_SAMPLES)
        self._prompt: dict[int, TokenCost] = {}
        self.ahead = TokenCost()
        self._unmeasured_steps = self._unused_steps = 0

    @property
    def is_measured(self) -> bool:
        """True if the base is known, or there is none."""
        return not self._rows or (len(self._plain_s) >= _MIN_PLAIN_STEPS and not self.is_outdated)

    @property
    def is_outdated(self) -> bool:
        """True if the base has to be measured again."""
        return self._rows > 0 and self._unmeasured_steps >= _MAX_UNMEASURED_STEPS

    @property
    def base_s(self) -> float:
        """Seconds of a plain step; 0 before one."""
        return median_low(self._plain_s) if self._plain_s else 0.0

    @property
    def ahead_cost(self) -> float:
        """Cost of a token ahead of every row, in plain steps."""
        prior = self._rows / (_PASS_TOKENS + self._rows)
        ahead_s = self.ahead.seconds
        if ahead_s is None or not self.base_s:
            return prior
        return ahead_s / self.base_s

    def expected_s(self, ahead_tokens: int) -> float:
        """Seconds of a step with so many tokens ahead of every row."""
        return self.base_s * (1.0 + self.ahead_cost * ahead_tokens)

    def prompt(self, context_tokens: int) -> TokenCost:
        """Cost of a prompt token in such a context; in one never seen, that in the next shorter one."""
        shorter = range(_class_of(context_tokens), -1, -1)
        known = (self._prompt[one] for one in shorter if one in self._prompt)
        return next(known, TokenCost())

    def observe_plain(self, duration_s: float) -> None:
        """Take in a step with one token of each row."""
        self._plain_s.append(duration_s)
        self._unmeasured_steps = 0
        self._unused_steps += 1
        if self._unused_steps > _PATIENCE_STEPS:
            self.ahead = TokenCost()

    def observe_ahead(self, ahead_tokens: int, duration_s: float) -> None:
        """Take in a step with so many tokens ahead of the row that had the most."""
        self._unmeasured_steps += 1
        if self._plain_s:
            self._unused_steps = 0
            if self.ahead.seconds is None:
                self.ahead = TokenCost(self.ahead_cost * self.base_s)
            self.ahead.observe(ahead_tokens, duration_s - self.base_s)

    def observe_prompt(
        self, tokens: int, context_tokens: int, more_s: float, *, is_rest: bool
    ) -> None:
        """Take in a step that prompt tokens behind so many others of their prompt made longer.

        Args:
            tokens: Prompt tokens of the step.
            context_tokens: Tokens before them in their prompt.
            more_s: Time beyond that of a step without them.
            is_rest: They were fewer than could be, and quick: that says nothing about more of them.
        """
        self._unmeasured_steps += 1
        if is_rest or not (self._plain_s or not self._rows):
            return
        longest_tokens = self.prompt(context_tokens).longest_tokens
        cost = self._prompt.setdefault(
            _class_of(context_tokens), TokenCost(longest_tokens=longest_tokens)
        )
        cost.observe(tokens, more_s)


def _class_of(context_tokens: int) -> int:
    return (context_tokens // _SHORT_CONTEXT_TOKENS).bit_length()
