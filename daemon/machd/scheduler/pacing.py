"""The pace of steps: how many prompt tokens and drafts one may compute.

All of it follows from one learnt cost (`step_cost.py`). Prompt tokens beside decoding rows are as many as take a
share of the step's time: a set one, or more where more prompts wait than rows decode. Alone they are as many as
take a second. Drafts are weighed in the engine, which knows what is proposed and is told what a token ahead costs;
a balance of time bounds what wrong ones cost (`draft_balance.py`).
"""

from __future__ import annotations

from collections.abc import Iterable

from machd.engine.protocol.step import Lane, SpanCost
from machd.scheduler.draft_balance import DraftBalance
from machd.scheduler.draft_reading import LEAST_BATCHED_GAIN
from machd.scheduler.step_cost import StepCost

PREFILL_CHUNK_TOKENS = 512
"""Most prompt tokens between two looks at the inbox: at 2.5 ms each 1.3 s on two cores."""

_ALONE_S = 1.0
"""Aim for a step without decoding rows: arriving and leaving requests wait for its end. With 6,000 tokens
before them, 512 take 7 s on two cores; in chunks of 100 the whole takes a tenth longer."""

_MIN_ALONE_TOKENS = 32
"""Fewer cost much more each, because a step reads all weights: 17.3 ms each in place of 12.1 over 5,000 tokens."""

PREFILL_SHARE = 0.45
"""Share of a step's time that prompts get beside decoding rows, unless set. The slowest steps in a hundred take a
quarter longer again, and are to stay under 2.5 times the usual ones."""

_CROWDED_STEP_S = 0.25
"""Most that a step takes because many prompts wait. Chosen, not measured: a gap of a quarter of a second in a stream."""

_MIN_CHUNK_TOKENS = 7
"""Fewest prompt tokens beside decoding rows, even beyond their share: a prompt that never got in would be worse. With
one row they make the eight that machd's kernels compute at once."""

_MAX_LEAP = 2
"""Longest step by the longest measured one: machd's kernels compute eight tokens at once and more in further turns, so
what few tokens cost says little of many. Chosen, not measured."""

_YOUNG_TOKENS = 8
"""Completion tokens up to which a pause does not break a stream's rhythm: with gaps of 85 ms two thirds of a second."""

_WEIGHT = 0.2
"""Weight of the newest step in the seconds of a prompt token: that of the last ten counts for nine tenths."""


class StepPace:
    """Learns from every step; costs stay for the next requests.

    Steps are told apart by lane and number of rows: a step of one row says nothing about eight.

    Attributes:
        drafts: Time that wrong drafts may cost.
        token_s: Recent seconds for each prompt token, rows beside it included; 0 before the first.
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
        self.drafts = DraftBalance()
        self.token_s = 0.0
        self._beside_decode = beside_decode
        self._stretch = share / (1.0 - share)
        self._alone = alone
        self._min_alone = min(alone, min_alone)
        self._costs: dict[tuple[Lane | None, int], StepCost] = {(None, 0): StepCost(0)}

    def is_configured_as(self, other: StepPace) -> bool:
        """Compare the settings of both, whatever either has learnt since."""
        mine = self._beside_decode, self._stretch, self._alone, self._min_alone
        return mine == (other._beside_decode, other._stretch, other._alone, other._min_alone)

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
            return self._prompt_tokens(None, self._costs[None, 0], _ALONE_S, context_tokens)
        if self._beside_decode is not None:
            return self._beside_decode
        cost = self._similar_cost(lane, rows)
        if cost is None:
            return 0
        # A prompt that waits weighs as much as a row that decodes.
        crowded_s = min(waiting / rows * cost.base_s, _CROWDED_STEP_S - cost.base_s)
        aim_s = max(self._aim_s(lane, cost), crowded_s)
        return self._prompt_tokens(lane, cost, aim_s, context_tokens)

    def encode_s(self, lane: Lane | None, rows: int) -> float:
        """Time for encoding in a step in which ``rows`` of ``lane`` decode; 0 asks for a step without.

        Args:
            lane: None where no row decodes.
            rows: Decoding rows of that lane.
        """
        cost = self._similar_cost(lane, rows)
        return 0.0 if cost is None else self._aim_s(lane, cost)

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
        return self.prefill_tokens(None, 0, context_tokens=context_tokens)

    def beside_tokens(self, rows: int, *, waiting: int, context_tokens: int) -> int:
        """Prompt tokens of each step in which so many rows decode, once such steps are measured; at least one."""
        lanes = [lane for lane, _ in self._costs if lane is not None]
        found = (
            self.prefill_tokens(lane, rows, waiting=waiting, context_tokens=context_tokens)
            for lane in lanes
        )
        return max(found, default=0) or _MIN_CHUNK_TOKENS

    def prompt_s(self, start: int, tokens: int) -> float:
        """Seconds that prompt tokens from a position on take, as learnt for their contexts."""
        alone = self._costs[None, 0]
        seconds_s, stop = 0.0, start + tokens
        for at in range(start, stop, PREFILL_CHUNK_TOKENS):
            known_s = alone.prompt(at).seconds
            token_s = self.token_s if known_s is None else known_s
            seconds_s += min(PREFILL_CHUNK_TOKENS, stop - at) * token_s
        return seconds_s

    def draft_tokens(self, lane: Lane, rows: int, max_tokens: int) -> int:
        """Draft tokens that each row of a step may have, ``max_tokens`` at most.

        0 while the step's base is not measured, and while wrong drafts have used up the balance.
        """
        cost = self._costs.get((lane, rows))
        if cost is None or not cost.is_measured or self.drafts.passes <= 0:
            return 0
        return min(max_tokens, 1 + _MAX_LEAP * cost.ahead.longest_tokens)

    def span_cost(self, lane: Lane, rows: int) -> SpanCost:
        """Cost of tokens ahead in a step of ``rows``."""
        cost = self._costs.get((lane, rows)) or StepCost(rows)
        return SpanCost(cost.ahead_cost, max(0.0, self.drafts.passes), LEAST_BATCHED_GAIN)

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
        cost = self._costs.setdefault((lane, rows), StepCost(rows))
        if prefill_tokens:
            token_s = duration_s / prefill_tokens
            self.token_s += (token_s - self.token_s) * (_WEIGHT if self.token_s else 1.0)
            more_s, aim_s = duration_s - cost.expected_s(ahead_tokens), self._aim_s(lane, cost)
            fitting_tokens = self._prompt_tokens(lane, cost, aim_s, context_tokens)
            is_rest = more_s <= aim_s and prefill_tokens < fitting_tokens
            cost.observe_prompt(prefill_tokens, context_tokens, more_s, is_rest=is_rest)
        elif lane is not None:
            self._settle(cost, rows, ahead_tokens, accepted_tokens, duration_s)
            if ahead_tokens:
                cost.observe_ahead(ahead_tokens, duration_s)
            else:
                cost.observe_plain(duration_s)

    def _settle(
        self, cost: StepCost, rows: int, ahead_tokens: int, accepted_tokens: int, duration_s: float
    ) -> None:
        """Charge a step with tokens ahead to the balance, or let it grow with a plain one."""
        base_s = cost.base_s
        if not cost.is_measured or not base_s:
            return
        if not ahead_tokens:
            self.drafts.settle_plain()
            return
        self.drafts.settle_drafts(
            rows,
            accepted_tokens,
            duration_passes=duration_s / base_s,
            usual_passes=cost.expected_s(ahead_tokens) / base_s,
        )

    def _aim_s(self, lane: Lane | None, cost: StepCost) -> float:
        """Time by which prompts may lengthen a step; alone, the time of the whole step."""
        return _ALONE_S if lane is None else self._stretch * cost.base_s

    def _prompt_tokens(
        self, lane: Lane | None, cost: StepCost, aim_s: float, context_tokens: int
    ) -> int:
        """Prompt tokens that take ``aim_s``, within bounds."""
        learnt = cost.prompt(context_tokens)
        fewest, most = self._min_alone, self._alone
        if lane is not None:
            fewest = _MIN_CHUNK_TOKENS
            most = min(PREFILL_CHUNK_TOKENS, _MAX_LEAP * learnt.longest_tokens)
        return round(max(fewest, min(most, learnt.tokens_in(aim_s))))

    def _similar_cost(self, lane: Lane | None, rows: int) -> StepCost | None:
        """The measured cost of so many rows, or of a number that the engine's slab rounds alike."""
        exact = self._costs.get((lane, rows))
        if exact is not None and exact.is_outdated:
            return None
        alike = [
            (abs(other - rows), cost)
            for (one, other), cost in self._costs.items()
            if one is lane and _slab_class(other) == _slab_class(rows) and cost.is_measured
        ]
        return min(alike, key=lambda pair: pair[0])[1] if alike else None


def _slab_class(rows: int) -> int:
    return (rows - 1).bit_length()
