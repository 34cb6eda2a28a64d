"""The pace of steps: how many prompt tokens and tokens ahead one may compute.

Both come from one learnt cost: a step in which rows decode takes a base time, for one token of each row,
and more for every token beyond. Prompt tokens are as many as take a share of the step's time: a set one, or more where
more prompts wait than rows decode. Tokens ahead are
weighed in the engine, which knows what is proposed; a balance of time bounds the cost of wrong drafts.
Durations come in; there is no clock here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from statistics import median_low

from machd.engine.protocol.step import Lane, SpanCost
from machd.scheduler.draft_reading import LEAST_BATCHED_GAIN

PREFILL_CHUNK_TOKENS = 512
"""Most prompt tokens between two looks at the inbox."""

_ALONE_S = 1.0
"""Aim for a step without decoding rows: arriving and leaving requests wait for its end. With 6,000 tokens
before them, 512 take 7 s on two cores; in chunks of 100 the whole takes a tenth longer."""

_MIN_ALONE_TOKENS = 32
"""Fewer cost much more each, because a step reads all weights."""

PREFILL_SHARE = 0.45
"""Share of a step's time that prompts get beside decoding rows, unless set. The slowest steps in a hundred take a
quarter longer again, and are to stay under 2.5 times the usual ones."""

_CROWDED_STEP_S = 0.25
"""Most that a step takes because many prompts wait: a stream's users see no longer gap."""

_FIRST_CHUNK_TOKENS, _MIN_CHUNK_TOKENS = 8.0, 7.0
"""The fewest are computed even beyond the aim: a prompt that never got in would be worse. With one row they make the eight that
machd's kernels compute at once."""

_MAX_SHRINK, _MAX_GROWTH = 0.5, 1.5
"""Bounds of what one step changes, so that a hiccup neither stops nor floods prefill."""

_YOUNG_TOKENS = 8
"""Completion tokens up to which a pause does not break a stream's rhythm."""

_PASS_TOKENS = 20
"""Prior: a pass costs before its first token as much as this many tokens of one row: 52 ms against 2.6 ms
on the CPU (docs/internals/performance.md)."""

_MIN_OF_PRIOR = 0.25
"""Share of its prior that a token ahead costs at least, so that noise never makes one seem free."""

_SAMPLES = 9
_MIN_SAMPLES, _MIN_DRAFT_SAMPLES = 3, 5
"""Plain steps to measure before prompt tokens, and before drafts, whose gain may be a few percent."""

_MAX_UNMEASURED_STEPS = 32
"""Steps with more than one token of each row before a plain one: contexts grow, and the base with them."""

_FIRST_PATIENCE_STEPS, _MAX_PATIENCE_STEPS = 25, 400
"""Plain steps after which the cost of tokens ahead is forgotten, doubled each time: a hiccup ends drafts
for a short time, and a machine where they never pay seldom tries again."""

_FIRST_BALANCE_PASSES, _MAX_BALANCE_PASSES = 0.5, 2.0
"""Passes that wrong drafts may cost before any was right, and the most that right ones earn."""

_GROWTH = 0.01
"""Share of the plain time that wrong drafts may cost for good. The promise is twice that: the other half
is for losses that noise hides."""

_MIN_HICCUP, _MAX_HICCUP = 0.75, 1.5
"""Bounds of a step's charge, in its usual duration."""

_WEIGHT = 0.2
"""Weight of the newest step in a moving average."""


class Acceptance:
    """Recent acceptance of a row's draft tokens."""

    __slots__ = ("_hits", "_misses")

    _PRIOR = 0.6
    _VERDICT_DECAY = 0.75
    _PLAIN_DECAY = 0.98
    _MAX_HITS = 4.0  # of one long success, so that the failures after it show

    def __init__(self) -> None:
        """Begin without a history."""
        self._hits = self._misses = 0.0

    @property
    def rate(self) -> float:
        """Estimated probability that a draft token is right if those before it are."""
        return (self._hits + self._PRIOR) / (self._hits + self._misses + 1.0)

    def observe(self, drafted_tokens: int, accepted_tokens: int) -> None:
        """Take in one verification."""
        self.fade(self._VERDICT_DECAY)
        self._hits += min(float(accepted_tokens), self._MAX_HITS)
        self._misses += accepted_tokens < drafted_tokens

    def fade(self, decay: float = _PLAIN_DECAY) -> None:
        """Let the history count less; by default as a step without drafts does."""
        self._hits *= decay
        self._misses *= decay


class _StepCost:
    """Learnt duration of steps in which one number of rows decodes: base + slope x tokens."""

    __slots__ = (
        "_ahead_s",
        "_last_ratio",
        "_patience_steps",
        "_plain_s",
        "_rows",
        "_stretch",
        "_unused_steps",
        "chunk_tokens",
        "longest",
        "unmeasured",
    )

    def __init__(self, rows: int, stretch: float) -> None:
        self._rows = rows
        self._stretch = stretch
        self._plain_s: deque[float] = deque(maxlen=_SAMPLES)
        self._ahead_s: deque[float] = deque(maxlen=_SAMPLES)  # for one token ahead of every row
        self._last_ratio: float | None = None
        self._unused_steps = 0
        self._patience_steps = _FIRST_PATIENCE_STEPS
        self.chunk_tokens = (
            _FIRST_CHUNK_TOKENS  # prompt tokens that lengthen the step by the stretch
        )
        self.unmeasured = 0
        self.longest = 0  # tokens ahead

    def is_measured(self, min_samples: int = _MIN_SAMPLES) -> bool:
        return len(self._plain_s) >= min_samples and self.unmeasured < _MAX_UNMEASURED_STEPS

    @property
    def base_s(self) -> float:
        return median_low(self._plain_s) if self._plain_s else 0.0

    @property
    def token_cost(self) -> float:
        """Cost of a token ahead of every row, in plain steps."""
        prior = self._rows / (_PASS_TOKENS + self._rows)
        if not self._ahead_s or not self.base_s:
            return prior
        return max(median_low(self._ahead_s) / self.base_s, _MIN_OF_PRIOR * prior)

    @property
    def allowed_s(self) -> float:
        """Time by which prompt tokens may lengthen the step."""
        return self._stretch * self.base_s

    def expected_s(self, ahead_tokens: int) -> float:
        return self.base_s * (1.0 + self.token_cost * ahead_tokens)

    def observe(self, prefill_tokens: int, ahead_tokens: int, duration_s: float) -> None:
        if not prefill_tokens and not ahead_tokens:
            self._plain_s.append(duration_s)
            self.unmeasured = 0
            self._unused_steps += 1
            if self._unused_steps > self._patience_steps and self._ahead_s:
                self._ahead_s.clear()
                self.longest = 0
                self._patience_steps = min(2 * self._patience_steps, _MAX_PATIENCE_STEPS)
            return
        self.unmeasured += 1
        if not self._plain_s:
            return
        if prefill_tokens:
            self._fit_chunk(prefill_tokens, duration_s - self.expected_s(ahead_tokens))
            return
        self._unused_steps = 0
        self.longest = max(self.longest, ahead_tokens)
        self._ahead_s.append(max(0.0, duration_s - self.base_s) / ahead_tokens)

    def _fit_chunk(self, prefill_tokens: int, more_s: float) -> None:
        allowed_s = self.allowed_s
        # Where many prompts waited the step had more tokens than chunk_tokens: count the cost of these alone.
        more_s *= min(1.0, self.chunk_tokens / prefill_tokens)
        # Beyond the bounds the exact ratio does not matter, and a cost of nothing has none.
        cost_s = max(more_s, allowed_s / _MAX_GROWTH)
        ratio = max(_MAX_SHRINK, allowed_s / cost_s) if cost_s else _MAX_GROWTH
        if ratio > 1 and prefill_tokens < int(self.chunk_tokens):
            return  # the prompt's rest: that a shorter chunk fits says nothing about this one
        # The gentler of two in a row: a step in which rows move to longer classes is one of its own.
        before, self._last_ratio = self._last_ratio or ratio, ratio
        ratio = max(min(ratio, 1.0), before) if before < 1 else min(max(ratio, 1.0), before)
        wanted = max(_MIN_CHUNK_TOKENS, self.chunk_tokens * ratio)
        self.chunk_tokens = min(float(PREFILL_CHUNK_TOKENS), wanted)


class StepPace:
    """Learns from every step; costs stay for the next requests.

    Steps are told apart by lane and number of rows: a step of one row says nothing about eight.

    Attributes:
        batched_gain: Tokens a second of steps with drafts for several rows over those without, a
            moving average; None before one.
    """

    def __init__(
        self,
        *,
        beside_decode: int | None,
        share: float = PREFILL_SHARE,
        alone: int = PREFILL_CHUNK_TOKENS,
        min_alone: int = _MIN_ALONE_TOKENS,
    ) -> None:
        """Begin without measurements.

        Args:
            beside_decode: Prompt tokens in a step in which rows decode; None measures.
            share: Of such a step's time, what prompts get at least where it is measured.
            alone: Most prompt tokens in a step in which none does.
            min_alone: Fewest prompt tokens in such a step, however long it takes.
        """
        self.batched_gain: float | None = None
        self._beside_decode = beside_decode
        self._stretch = share / (1.0 - share)
        self._alone = alone
        self._min_alone = min(alone, min_alone)
        self._alone_tokens: dict[int, float] = {}
        self._prompt_token_s = 0.0
        self._costs: dict[tuple[Lane, int], _StepCost] = {}
        self._balance_passes = _FIRST_BALANCE_PASSES

    def is_configured_as(self, other: StepPace) -> bool:
        """Compare the settings of both, whatever either has learnt since."""
        mine = self._beside_decode, self._stretch, self._alone, self._min_alone
        return mine == (other._beside_decode, other._stretch, other._alone, other._min_alone)

    @property
    def token_s(self) -> float:
        """Recent seconds for each prompt token, rows beside it included; 0 before the first."""
        return self._prompt_token_s

    def prefill_tokens(
        self, lane: Lane | None, rows: int, *, waiting: int = 1, context_tokens: int = 0
    ) -> int:
        """Prompt tokens for a step in which ``rows`` of ``lane`` decode.

        0 asks for a step without prefill, to measure it: three times for a new number of rows, later
        now and then.

        Args:
            lane: None where no row decodes.
            rows: Decoding rows of that lane.
            waiting: Prompts that could be computed.
            context_tokens: Tokens before the next chunk of the prompt.
        """
        if lane is None:
            return self._tokens_alone(context_tokens)
        if self._beside_decode is not None:
            return self._beside_decode
        cost = self._similar_cost(lane, rows)
        if cost is None:
            return 0
        # A prompt that waits weighs as much as a row that decodes.
        wanted_s = max(cost.allowed_s, waiting / rows * cost.base_s)
        wanted_s = max(cost.allowed_s, min(wanted_s, _CROWDED_STEP_S - cost.base_s))
        more = wanted_s / cost.allowed_s if cost.allowed_s else 1.0
        return min(int(cost.chunk_tokens * more), PREFILL_CHUNK_TOKENS)

    def encode_s(self, lane: Lane | None, rows: int) -> float:
        """Time for encoding in a step in which ``rows`` of ``lane`` decode; 0 asks for a step without.

        Args:
            lane: None where no row decodes.
            rows: Decoding rows of that lane.
        """
        if lane is None:
            return _ALONE_S
        cost = self._similar_cost(lane, rows)
        return 0.0 if cost is None else cost.allowed_s

    def burst_tokens(self, completions: Iterable[int], *, context_tokens: int = 0) -> int:
        """Prompt tokens for a step of its own, before rows with so few tokens go on decoding.

        Requests that come together are to run together: prefilled in small chunks beside the first
        of them, the others would take several times as long and run behind for good.

        Args:
            completions: Completion tokens of each row that could decode.
            context_tokens: Tokens before the next chunk of the prompt.
        """
        is_young = all(tokens < _YOUNG_TOKENS for tokens in completions)
        if not is_young or self._beside_decode is not None:
            return 0
        return self._tokens_alone(context_tokens)

    def draft_tokens(self, lane: Lane, rows: int, max_tokens: int) -> int:
        """Draft tokens that each row of a step may have, ``max_tokens`` at most.

        0 while the step's base is not measured, and while wrong drafts have used up the balance.
        Longer drafts than twice the longest measured would be a leap.
        """
        cost = self._costs.get((lane, rows))
        if cost is None or not cost.is_measured(_MIN_DRAFT_SAMPLES) or self._balance_passes <= 0:
            return 0
        return min(max_tokens, 1 + 2 * cost.longest)

    def span_cost(self, lane: Lane, rows: int) -> SpanCost:
        """Cost of tokens ahead in a step of ``rows``."""
        cost = self._costs.get((lane, rows)) or _StepCost(rows, self._stretch)
        return SpanCost(cost.token_cost, max(0.0, self._balance_passes), LEAST_BATCHED_GAIN)

    def observe(  # noqa: PLR0913 - one argument for each fact of a step
        self,
        lane: Lane | None,
        rows: int,
        *,
        duration_s: float,
        prefill_tokens: int = 0,
        context_tokens: int = 0,
        ahead_tokens: int = 0,
        accepted_tokens: int = 0,
    ) -> None:
        """Take in the duration of a step.

        Args:
            lane: Lane of the rows that decoded; None if none did.
            rows: Rows that decoded.
            duration_s: Wall time of the engine's run.
            prefill_tokens: Prompt tokens of the step.
            context_tokens: Tokens before them in their prompt.
            ahead_tokens: Tokens ahead of the row that had the most.
            accepted_tokens: Tokens that all rows got beside one each.
        """
        if prefill_tokens:
            token_s = duration_s / prefill_tokens
            weight = _WEIGHT if self._prompt_token_s else 1.0
            self._prompt_token_s += (token_s - self._prompt_token_s) * weight
        if lane is None:
            if prefill_tokens:
                self._observe_alone(context_tokens, prefill_tokens, duration_s)
            return
        cost = self._costs.setdefault((lane, rows), _StepCost(rows, self._stretch))
        if cost.is_measured() and not prefill_tokens:
            self._settle(cost, rows, ahead_tokens, accepted_tokens, duration_s)
        cost.observe(prefill_tokens, ahead_tokens, duration_s)

    def _settle(
        self, cost: _StepCost, rows: int, ahead_tokens: int, accepted_tokens: int, duration_s: float
    ) -> None:
        """Charge a step with tokens ahead to the balance, or let it grow with a plain one."""
        base_s, gained = cost.base_s, accepted_tokens / rows
        if not base_s:
            return
        lost = 0.0
        if ahead_tokens:
            usual_s = cost.expected_s(ahead_tokens)
            charged_s = min(max(duration_s, _MIN_HICCUP * usual_s), _MAX_HICCUP * usual_s)
            lost = charged_s / base_s - 1.0
            if rows > 1:
                gain = (1.0 + gained) / (1.0 + lost)
                before = gain if self.batched_gain is None else self.batched_gain
                self.batched_gain = before + (gain - before) * _WEIGHT
        balance = self._balance_passes + gained + _GROWTH * (1.0 + gained) - lost
        self._balance_passes = max(-_MAX_BALANCE_PASSES, min(balance, _MAX_BALANCE_PASSES))

    def _tokens_alone(self, context_tokens: int) -> int:
        """Prompt tokens that take _ALONE_S; in a context never seen, as in the next shorter one."""
        widths = range(_width(context_tokens), -1, -1)
        known = (self._alone_tokens[one] for one in widths if one in self._alone_tokens)
        return int(next(known, self._alone))

    def _observe_alone(self, context_tokens: int, prefill_tokens: int, duration_s: float) -> None:
        if duration_s <= _ALONE_S and prefill_tokens < self._tokens_alone(context_tokens):
            return  # the prompt's rest: that a shorter chunk is quick says nothing about a longer one
        ratio = min(_ALONE_S / duration_s, _MAX_GROWTH) if duration_s else _MAX_GROWTH
        wanted = max(self._min_alone, min(float(self._alone), prefill_tokens * ratio))
        self._alone_tokens[_width(context_tokens)] = wanted

    def _similar_cost(self, lane: Lane, rows: int) -> _StepCost | None:
        """The measured cost of so many rows, or of a number that the engine's slab rounds alike."""
        exact = self._costs.get((lane, rows))
        if exact is not None and exact.unmeasured >= _MAX_UNMEASURED_STEPS:
            return None
        alike = [
            (abs(other - rows), cost)
            for (one, other), cost in self._costs.items()
            if one is lane and _slab_class(other) == _slab_class(rows) and cost.is_measured()
        ]
        return min(alike, key=lambda pair: pair[0])[1] if alike else None


def _width(context_tokens: int) -> int:
    """Class of a context: a token costs more the more it attends to."""
    return (context_tokens // PREFILL_CHUNK_TOKENS).bit_length()


def _slab_class(rows: int) -> int:
    return (rows - 1).bit_length()
