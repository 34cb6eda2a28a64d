"""When sequences will leave their slots: what a client that the queue has no room for is told.

A slot's sequence has prompt tokens left to compute and completion tokens left to decode. The time of both is learnt
from steps, the length of completions from those that have ended. The forecast runs these forward, with the pace's own
shares of prompts in steps, to the departure that makes room.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil

from machd.engine.protocol.step import StepPlan, StepResult
from machd.scheduler.pacing import StepPace
from machd.scheduler.plan import in_turn
from machd.scheduler.sequence import Sequence

_WEIGHT = 0.2
"""Weight of the newest step: that of the last ten counts for nine tenths."""

_ENDED_SEQUENCES = 64
"""Newest ended sequences whose lengths count."""

_MAX_EVENTS = 2000
"""Most ends of prompts and sequences that one forecast looks at."""


@dataclass(slots=True)
class _Row:
    """A sequence of a forecast: tokens left of prompt and completion, and those made."""

    prompt_start: int
    prompt_tokens: int
    completion_tokens: int
    made_tokens: int = 0


class Departures:
    """Learns the time of tokens and the lengths of completions, and forecasts departures."""

    def __init__(self) -> None:
        """Begin without measurements."""
        # By the number of rows: seconds of a step, and tokens that a row gets in it.
        self._steps: dict[int, tuple[float, float]] = {}
        self._committed_s: float | None = None
        self._ended: deque[tuple[int, bool]] = deque(maxlen=_ENDED_SEQUENCES)

    def observe(
        self,
        plan: StepPlan,
        result: StepResult,
        running: Iterable[Sequence],
        *,
        now_s: float,
        duration_s: float,
    ) -> None:
        """Take in a step, before its tokens end any sequence.

        Args:
            plan: The step's.
            result: What came of it.
            running: The sequences that it was planned for.
            now_s: Its end on the monotonic clock.
            duration_s: Wall time of the engine's run.
        """
        previous_s, self._committed_s = self._committed_s, now_s
        # What lies between two steps costs time, too. A step after a pause has a prompt, and is no measurement.
        step_s = duration_s if previous_s is None else max(duration_s, now_s - previous_s)
        rows = sum(one.is_prefilled for one in running)
        if plan.prefill or plan.encode or not result.tokens or not rows:
            return
        row_tokens = len(result.tokens) / rows
        known_s, known_tokens = self._steps.get(rows, (step_s, row_tokens))
        # Apart, since with drafts the mean of their quotients is above the quotient of their means.
        self._steps[rows] = (
            known_s + _WEIGHT * (step_s - known_s),
            known_tokens + _WEIGHT * (row_tokens - known_tokens),
        )

    def note_end(self, sequence: Sequence) -> None:
        """Take in the length of a sequence that leaves its slot."""
        tokens = sequence.completion_tokens
        self._ended.append((tokens, tokens >= sequence.request.max_tokens))

    def seconds_until(
        self,
        count: int,
        running: Iterable[Sequence],
        waiting: Iterable[Sequence],
        pace: StepPace,
    ) -> float:
        """Return the seconds until so many sequences have left, or until all have; 0 before any step was measured.

        Args:
            count: Departures, at least one.
            running: Sequences with slots.
            waiting: Sequences that get the slots of those that leave, in order.
            pace: Prompt tokens of steps.
        """
        if not self._steps:
            return 0.0
        rows, queue = self._rows(running, pace.token_s), iter(waiting)
        seconds_s = 0.0
        for _ in range(_MAX_EVENTS):
            if not rows or count <= 0:
                break
            seconds_s += self._advance(rows, pace)
            left = [one for one in rows if one.prompt_tokens or one.completion_tokens > 0]
            gone = len(rows) - len(left)
            rows, count = left, count - gone
            followers = [one for _, one in zip(range(gone), queue, strict=False)]
            rows += [self._row(one, 0.5) for one in followers]
        return seconds_s

    def _rows(self, running: Iterable[Sequence], token_s: float) -> list[_Row]:
        """Make rows of running sequences, in the order in which their prompts are computed.

        The lengths of many are spread over what is likely: the first of eight leaves long before one of them does by
        itself.
        """
        nearest = sorted(running, key=lambda one: self._left_tokens(one, 0.5))
        rows = {
            one: self._row(one, (place + 0.5) / len(nearest)) for place, one in enumerate(nearest)
        }
        return [rows[one] for one in in_turn(rows, token_s)]

    def _row(self, sequence: Sequence, quantile: float) -> _Row:
        return _Row(
            sequence.prefilled_tokens,
            sequence.unprefilled_tokens,
            self._left_tokens(sequence, quantile),
            sequence.completion_tokens,
        )

    def _left_tokens(self, sequence: Sequence, quantile: float) -> int:
        """Return how many tokens a completion has still to come, by those that got further than it has."""
        made, most = sequence.completion_tokens, sequence.request.max_tokens
        lengths = sorted(
            most if is_cut else min(tokens, most)
            for tokens, is_cut in self._ended
            if is_cut or tokens > made
        )
        whole = lengths[int(quantile * len(lengths))] if lengths else most
        return max(1, whole - made) if most else 0

    def _advance(self, rows: list[_Row], pace: StepPace) -> float:
        """Run rows forward to the next end of a prompt or a completion; return the seconds that this takes."""
        decoding = [one for one in rows if not one.prompt_tokens]
        prompts = [one for one in rows if one.prompt_tokens]
        prompt = prompts[0] if prompts else None
        if prompt is not None and _goes_first(prompt, decoding, pace):
            seconds_s = pace.prompt_s(prompt.prompt_start, prompt.prompt_tokens)
            prompt.prompt_start += prompt.prompt_tokens
            prompt.prompt_tokens = 0
            return seconds_s
        steps = min(one.completion_tokens for one in decoding)
        seconds_s = 0.0
        if prompt is not None:
            chunk = pace.beside_tokens(
                len(decoding), waiting=len(prompts), context_tokens=prompt.prompt_start
            )
            steps = min(steps, ceil(prompt.prompt_tokens / chunk))
            done = min(prompt.prompt_tokens, steps * chunk)
            seconds_s = pace.prompt_s(prompt.prompt_start, done)
            prompt.prompt_start += done
            prompt.prompt_tokens -= done
        for one in decoding:
            one.completion_tokens -= steps
            one.made_tokens += steps
        return seconds_s + steps * self._row_token_s(len(decoding))

    def _row_token_s(self, rows: int) -> float:
        """Return the seconds of one token of each of so many rows, by the nearest number that was measured."""
        step_s, row_tokens = self._steps[min(self._steps, key=lambda known: abs(known - rows))]
        return step_s / row_tokens


def _goes_first(prompt: _Row, decoding: list[_Row], pace: StepPace) -> bool:
    """Return whether a prompt is computed before any row goes on decoding."""
    made = (one.made_tokens for one in decoding)
    return not decoding or prompt.prompt_tokens <= pace.burst_tokens(
        made, context_tokens=prompt.prompt_start
    )
