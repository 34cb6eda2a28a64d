"""A scheduler whose queue is always full, on an engine whose steps take simulated time: what refused clients are told."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median

from machd.engine.protocol.step import StepPlan
from machd.errors import QueueFullError
from machd.scheduler.config import SchedulerConfig
from machd.scheduler.events import SequenceFinished
from machd.scheduler.scheduler import Scheduler
from machd.scheduler.subscriber import SequenceRequest
from support.engines.fake_engine import FakeEngine
from support.schedulers.sequence_samples import only, request_of

MakeRequest = Callable[[random.Random], SequenceRequest]
StepSeconds = Callable[[StepPlan], float]


def on_two_cores(plan: StepPlan) -> float:
    """Return about what a step of the embedded model takes on two cores."""
    contexts = [chunk.start for chunk in plan.prefill]
    token_s = 0.0025 + 0.0000019 * max(contexts, default=0)
    decode_s = 0.047 + 0.005 * len(plan.decode) if plan.decode else 0.005
    return decode_s + token_s * plan.prefill_tokens


@dataclass(frozen=True)
class Refusal:
    """What a refused client was told, and what it would have had to wait.

    Attributes:
        forecast_s: Before rounding.
        told_s: Its Retry-After.
        actual_s: From then until the queue had room.
    """

    forecast_s: float
    told_s: int
    actual_s: float


class FullQueue:
    """Clients that fill the queue as soon as it has room, and one that is refused now and then."""

    def __init__(
        self,
        config: SchedulerConfig,
        make_request: MakeRequest,
        step_s: StepSeconds = on_two_cores,
        *,
        noise: float = 0.1,
        seed: int = 0,
    ) -> None:
        """Start empty; steps take ``step_s``, off by ``noise`` of it at most."""
        limits = replace(config.limits, queue_timeout_s=math.inf, request_timeout_s=math.inf)
        self._scheduler = Scheduler(replace(config, limits=limits))
        self._max_queue = limits.max_queue
        self._make_request = make_request
        self._step_s = step_s
        self._noise = noise
        self._random = random.Random(seed)
        self._engine = FakeEngine()
        self._now_s = 0.0
        self._count = 0
        self._asked: list[tuple[float, float, int]] = []

    def refusals(self, count: int, *, warm_up: int) -> list[Refusal]:
        """Run until so many clients were refused and could have come back, after ``warm_up`` ends of sequences."""
        ended, refusals = 0, list[Refusal]()
        while len(refusals) < count:
            ended += self._step()
            refusals += self._answered()
            while self._has_room():
                self._submit()
            if ended >= warm_up and self._random.random() < 0.1:
                self._ask()
        return refusals

    def _step(self) -> int:
        """Run a step; returns how many sequences ended."""
        scheduler = self._scheduler
        scheduler.admit(self._now_s)
        plan = scheduler.plan()
        result = self._engine.run(plan)
        duration_s = self._step_s(plan) * self._random.uniform(1 - self._noise, 1 + self._noise)
        self._now_s += duration_s + 0.001  # for events and the inbox
        events = scheduler.commit(plan, result, self._now_s, duration_s=duration_s)
        scheduler.admit(self._now_s)
        return len(only(SequenceFinished, events))

    def _has_room(self) -> bool:
        scheduler = self._scheduler
        free = scheduler.slot_count - scheduler.active_loops
        return scheduler.waiting_count + 1 - free <= self._max_queue

    def _submit(self) -> list[SequenceFinished]:
        self._count += 1
        name = f"r{self._count}"
        request = replace(
            self._make_request(self._random),
            sequence_id=name,
            group_id=name,
            request_id=name,
            arrived_s=self._now_s,
        )
        return only(SequenceFinished, self._scheduler.submit((request,), self._now_s))

    def _ask(self) -> None:
        forecast_s = self._scheduler.departure_s(1)
        (refused,) = self._submit()
        assert isinstance(refused.error, QueueFullError)
        self._asked.append((self._now_s, forecast_s, refused.error.retry_after_s))

    def _answered(self) -> list[Refusal]:
        if not self._has_room():
            return []
        asked, self._asked = self._asked, []
        return [Refusal(forecast, told, self._now_s - at) for at, forecast, told in asked]


def median_error(refusals: list[Refusal]) -> float:
    """Median of the forecasts' distances from what was so, as shares of that."""
    return median(abs(one.forecast_s - one.actual_s) / one.actual_s for one in refusals)


def bench_request(prompt_tokens: int, max_tokens: int) -> MakeRequest:
    """Make requests like the bench's: prompts that differ in length by a tenth, answers that do not."""

    def make(draw: random.Random) -> SequenceRequest:
        tokens = round(prompt_tokens * draw.uniform(0.95, 1.05))
        return request_of(prompt_tokens=tokens, max_tokens=max_tokens, stop_token_ids=())

    return make
