"""All that ``machd bench --speculation`` found out."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import reduce
from operator import add
from typing import Self

from msgspec import Struct

from machd.bench.goal import Verdict
from machd.bench.speculation.counters import DraftCounters
from machd.bench.speculation.pairs import Pair
from machd.bench.speculation.plan import LEAST_JUDGED_ROUNDS, SpeculationPlan
from machd.bench.speculation.server import TimedDecode
from machd.bench.speculation.workloads import GOALS, Copying
from machd.bench.statistics import Distribution, percentile


class Spread(Struct, frozen=True, kw_only=True):
    """Quartiles of the rounds; the second one is the median."""

    p25: float
    p50: float
    p75: float

    @classmethod
    def of(cls, sample: Iterable[float]) -> Self:
        """Of at least one round."""
        ordered = sorted(sample)
        return cls(
            p25=percentile(ordered, 25), p50=percentile(ordered, 50), p75=percentile(ordered, 75)
        )

    def verdict(self, goal: float, rounds: int) -> Verdict:
        """Hold ratios against the least that is wanted."""
        if rounds < LEAST_JUDGED_ROUNDS or self.p25 < goal <= self.p75:
            return Verdict.NOT_SHOWN
        return Verdict.PASS if self.p25 >= goal else Verdict.MISSED


class GuessFigures(Struct, frozen=True, kw_only=True):
    """What became of guesses, over all rounds.

    Attributes:
        drafted_tokens: Guesses that were verified.
        accepted_tokens: Those that were right.
        acceptance: The share of those; null where nothing was guessed.
        drafted_by_position: How many first, second, ... guesses there were; empty where the daemon
            does not say.
        accepted_by_position: How many of them were right, with all before them.
        cycles: Passes that verified guesses; null where the daemon does not say.
        fallbacks: Requests for which guessing failed; null where the daemon does not say.
        tokens_per_pass: Tokens over passes, those without guesses included: every pass makes one
            token besides the guesses that it finds right.
    """

    drafted_tokens: int
    accepted_tokens: int
    acceptance: float | None
    drafted_by_position: list[int]
    accepted_by_position: list[int]
    cycles: int | None
    fallbacks: int | None
    tokens_per_pass: float

    @classmethod
    def of(cls, counters: DraftCounters, completion_tokens: int) -> Self:
        """Sum up.

        Args:
            counters: Of all answers together.
            completion_tokens: Of the same.
        """
        drafted_tokens, accepted_tokens = counters.drafted_tokens, counters.accepted_tokens
        drafted, accepted = counters.drafted_by_position, counters.accepted_by_position
        positions = [one for one, count in sorted(drafted.items()) if count]
        return cls(
            drafted_tokens=drafted_tokens,
            accepted_tokens=accepted_tokens,
            acceptance=accepted_tokens / drafted_tokens if drafted_tokens else None,
            drafted_by_position=[drafted[one] for one in positions],
            accepted_by_position=[accepted.get(one, 0) for one in positions],
            cycles=counters.cycles,
            fallbacks=counters.fallbacks,
            # The last pass may find more right than the answer has room for.
            tokens_per_pass=completion_tokens / max(1, completion_tokens - accepted_tokens),
        )

    @property
    def acceptance_by_position(self) -> list[float]:
        """The share of first, second, ... guesses that were right with all before them."""
        pairs = zip(self.accepted_by_position, self.drafted_by_position, strict=True)
        return [accepted / drafted for accepted, drafted in pairs]


class PromptFigures(Struct, frozen=True, kw_only=True):
    """One prompt, over all rounds.

    Attributes:
        prompt: Its name.
        prompt_tokens: As the daemon counted them.
        ratio: Tokens/s with guesses over those without, of a pair; the median.
        guesses: Null where the daemon does not say.
        different_texts: Rounds in which guesses changed the answer.
    """

    prompt: str
    prompt_tokens: int
    ratio: float
    guesses: GuessFigures | None
    different_texts: int

    @classmethod
    def of(cls, pairs: Sequence[Pair]) -> Self:
        """Sum up the pairs of one prompt; at least one."""
        return cls(
            prompt=pairs[0].prompt.name,
            prompt_tokens=pairs[0].off.timing.prompt_tokens,
            ratio=statistics.median(_tps([one.on]) / _tps([one.off]) for one in pairs),
            guesses=_guesses(pairs),
            different_texts=sum(not one.has_same_text for one in pairs),
        )


class WorkloadFigures(Struct, frozen=True, kw_only=True):
    """One workload.

    Attributes:
        workload: ``quote``, ``edit`` or ``prose``.
        goal: The least ratio that is wanted.
        pairs: Answers of each daemon.
        completion_tokens: Of the daemon that guesses.
        off_tps: Tokens over the time that they took, of all prompts of a round together, without
            guesses. What is there at an answer's first moment counts neither with its tokens nor
            with its time.
        on_tps: The same with guesses.
        ratio: A round's ``on_tps`` over its ``off_tps``.
        off_ttft: To the first token, without guesses.
        on_ttft: With guesses.
        guesses: Null where the daemon does not say.
        different_texts: Pairs in which guesses changed the answer.
        prompts: Each for itself.
    """

    workload: Copying
    goal: float
    verdict: Verdict
    pairs: int
    completion_tokens: int
    off_tps: Spread
    on_tps: Spread
    ratio: Spread
    off_ttft: Distribution
    on_ttft: Distribution
    guesses: GuessFigures | None
    different_texts: int
    prompts: list[PromptFigures]

    @classmethod
    def of(cls, copying: Copying, pairs: Sequence[Pair]) -> Self:
        """Sum up the pairs of one workload; at least one."""
        rounds = _grouped(pairs, lambda pair: pair.round_number)
        off = [_tps([pair.off for pair in one]) for one in rounds]
        on = [_tps([pair.on for pair in one]) for one in rounds]
        ratio = Spread.of(fast / plain for fast, plain in zip(on, off, strict=True))
        prompts = _grouped(pairs, lambda pair: pair.prompt.name)
        return cls(
            workload=copying,
            goal=GOALS[copying],
            verdict=ratio.verdict(GOALS[copying], len(rounds)),
            pairs=len(pairs),
            completion_tokens=_completion_tokens(pairs),
            off_tps=Spread.of(off),
            on_tps=Spread.of(on),
            ratio=ratio,
            off_ttft=_ttft([pair.off for pair in pairs]),
            on_ttft=_ttft([pair.on for pair in pairs]),
            guesses=_guesses(pairs),
            different_texts=sum(not one.has_same_text for one in pairs),
            prompts=[PromptFigures.of(one) for one in prompts],
        )


class SpeculationFigures(Struct, frozen=True, kw_only=True):
    """A whole comparison.

    Attributes:
        mode: What was asked for by ``speculation.mode``.
        active_mode: What the daemon does, as it says; null where it does not say.
        reason: Why it does so.
        tokens: Of an answer.
        rounds: How often each prompt was asked of both daemons.
        workloads: In the order in which they were asked.
    """

    mode: str
    active_mode: str | None
    reason: str | None
    tokens: int
    rounds: int
    workloads: list[WorkloadFigures]

    @classmethod
    def of(
        cls,
        plan: SpeculationPlan,
        pairs: Sequence[Pair],
        *,
        active_mode: str | None,
        reason: str | None,
    ) -> Self:
        """Sum up at least one round."""
        return cls(
            mode=plan.mode,
            active_mode=active_mode,
            reason=reason,
            tokens=plan.tokens,
            rounds=plan.rounds,
            workloads=[
                WorkloadFigures.of(one[0].prompt.copying, one)
                for one in _grouped(pairs, lambda pair: pair.prompt.copying)
            ],
        )


def _grouped(pairs: Sequence[Pair], key: Callable[[Pair], Hashable]) -> list[list[Pair]]:
    """Pairs with the same key together, in the order in which keys came up."""
    groups: dict[Hashable, list[Pair]] = {}
    for pair in pairs:
        groups.setdefault(key(pair), []).append(pair)
    return list(groups.values())


def _tps(answers: Sequence[TimedDecode]) -> float:
    return sum(one.decoded_tokens for one in answers) / sum(one.decode_s for one in answers)


def _completion_tokens(pairs: Sequence[Pair]) -> int:
    return sum(one.on.timing.completion_tokens for one in pairs)


def _guesses(pairs: Sequence[Pair]) -> GuessFigures | None:
    counted = [one.counters for one in pairs if one.counters is not None]
    if len(counted) < len(pairs):
        return None
    return GuessFigures.of(reduce(add, counted), _completion_tokens(pairs))


def _ttft(answers: Sequence[TimedDecode]) -> Distribution:
    sample = Distribution.of(one.timing.ttft_s for one in answers)
    assert sample is not None, "there is a pair"
    return sample
