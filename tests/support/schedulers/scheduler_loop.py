"""A scheduler and a fake engine, step by step: what it tells of each sequence, and how it takes a fault."""

from __future__ import annotations

from collections.abc import Collection

from machd.engine.protocol.engine import Engine
from machd.engine.protocol.step import SampledToken, StepPlan
from machd.errors import EngineFaultError
from machd.scheduler.config import SchedulerConfig, continuous
from machd.scheduler.events import Event, SequenceFinished
from machd.scheduler.prefix_cache import PrefixCache
from machd.scheduler.scheduler import Scheduler
from machd.scheduler.subscriber import SequenceRequest
from support.engines.fake_engine import FakeEngine, lettered
from support.schedulers.sequence_samples import LIMITS, batching_of, only, outputs_of, run_step

FAULT = EngineFaultError("planted")


def completion_of(request: SequenceRequest) -> tuple[int, ...]:
    """Return all tokens that the fake engine gives a request."""
    return tuple(lettered(request.prompt, request.sampling, at) for at in range(request.max_tokens))


def tokens_of(name: str, events: Collection[Event]) -> tuple[int, ...]:
    """Return the tokens that events tell of a sequence."""
    return tuple(one.token_id for one in outputs_of(SampledToken, events, name))


def run_to_end(scheduler: Scheduler, engine: Engine, now_s: float = 0.0) -> list[Event]:
    """Run steps until no sequence is left."""
    events: list[Event] = []
    while scheduler.running_count + scheduler.waiting_count:
        events += run_step(scheduler, engine, now_s)
        scheduler.check_invariants()
    return events


class SchedulerLoop:
    """A scheduler, its engine, and the events so far.

    Attributes:
        poison: Id of the sequence with which each step fails; empty for none.
        widths: Number of rows of each step.
    """

    def __init__(
        self, config: SchedulerConfig | None = None, prefixes: PrefixCache | None = None
    ) -> None:
        """Start idle, with four slots unless configured."""
        self.scheduler = Scheduler(config or continuous(LIMITS, batching_of(max_b=4)), prefixes)
        self.engine = FakeEngine(before_step=self._before_step)
        self.poison = ""
        self.events: list[Event] = []
        self.widths: list[int] = []

    def _before_step(self, plan: StepPlan) -> None:
        rows = {one.slot_index for one in plan.prefill} | {one.slot_index for one in plan.decode}
        names = {self.scheduler._running.at(one).request.sequence_id for one in rows}
        self.widths.append(len(names))
        if self.poison in names:
            raise RuntimeError("planted")

    def submit(self, *requests: SequenceRequest, now_s: float = 0.0) -> None:
        """Submit each request by itself."""
        for request in requests:
            self.events += self.scheduler.submit((request,), now_s)

    def step(self) -> None:
        """Run a step, and survive it if it fails."""
        try:
            self.events += run_step(self.scheduler, self.engine, 0.0)
        except RuntimeError:
            self.fail()
        self.scheduler.check_invariants()

    def fail(self) -> None:
        """Have the scheduler survive a step that failed."""
        self.events += self.scheduler.survive(FAULT, 0.0)
        self.engine.reset()

    def run(self) -> dict[str, SequenceFinished]:
        """Run until nothing is left; returns the ends by sequence."""
        while self.scheduler.running_count + self.scheduler.waiting_count:
            self.step()
        return self.ends

    @property
    def ends(self) -> dict[str, SequenceFinished]:
        """Ends so far, by sequence."""
        return {one.sequence_id: one for one in only(SequenceFinished, self.events)}

    def said(self, name: str) -> tuple[int, ...]:
        """Return the tokens that a sequence was told so far."""
        return tokens_of(name, self.events)
