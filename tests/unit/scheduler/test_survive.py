"""Sequences after a failed step: all are resumed, one at a time at first, and one that fails alone is to blame."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.engines.fake_engine import FakeEngine, lettered
from support.schedulers.sequence_samples import (
    LIMITS,
    batching_of,
    only,
    outputs_of,
    request_of,
    run_step,
)

from machd.engine.protocol.step import SampledToken, StepPlan
from machd.errors import EngineFaultError
from machd.scheduler.config import continuous
from machd.scheduler.events import (
    Event,
    FinishReason,
    SequenceAdmitted,
    SequenceFinished,
    SequenceResumed,
    SuspendReason,
)
from machd.scheduler.scheduler import Scheduler

_FAULT = EngineFaultError("planted")
_TOKENS = 6


class _Loop:
    """A scheduler and an engine that fails when it is told to."""

    def __init__(self, *names: str) -> None:
        self.scheduler = Scheduler(continuous(LIMITS, batching_of(max_b=4)))
        self.engine = FakeEngine(before_step=self._before_step)
        self.poison = ""
        self.events: list[Event] = []
        self.widths: list[int] = []
        self.submit(*names)

    def _before_step(self, plan: StepPlan) -> None:
        rows = {one.slot_index for one in plan.prefill} | {one.slot_index for one in plan.decode}
        names = {self.scheduler._running.at(one).request.sequence_id for one in rows}
        self.widths.append(len(names))
        if self.poison in names:
            raise RuntimeError("planted")

    def submit(self, *names: str) -> None:
        for name in names:
            arrived_s = (ord(name) - ord("a")) / 100
            request = replace(request_of(name, max_tokens=_TOKENS), arrived_s=arrived_s)
            self.events += self.scheduler.submit((request,), 0.0)

    def step(self) -> None:
        try:
            self.events += run_step(self.scheduler, self.engine, 0.0)
        except RuntimeError:
            self.fail()
        self.scheduler.check_invariants()

    def fail(self) -> None:
        self.events += self.scheduler.survive(_FAULT, 0.0)
        self.engine.reset()

    def run(self) -> dict[str, SequenceFinished]:
        while self.scheduler.running_count + self.scheduler.waiting_count:
            self.step()
        return {one.sequence_id: one for one in only(SequenceFinished, self.events)}

    def said(self, name: str) -> list[int]:
        return [one.token_id for one in outputs_of(SampledToken, self.events, name)]


def _expected() -> list[int]:
    request = request_of("a")
    return [lettered(request.prompt, request.sampling, at) for at in range(_TOKENS)]


@pytest.mark.parametrize("steps", range(1, 5))
def test_a_fault_costs_nobody_a_token(steps: int) -> None:
    """Whenever it comes: each goes on alone for a token, then all together, behind what they had said."""
    loop = _Loop("a", "b", "c")
    for _ in range(steps):
        loop.step()
    loop.fail()
    del loop.widths[:]
    ends = loop.run()
    assert {one.reason for one in ends.values()} == {FinishReason.LENGTH}
    for name in "abc":
        assert loop.said(name) == _expected(), name
    resumed = only(SequenceResumed, loop.events)
    assert {one.reason for one in resumed} <= {SuspendReason.FAULT}
    assert loop.widths[:3] == [1, 1, 1], "one suspect at a time"
    assert max(loop.widths) == 3, "then all together"


def test_a_sequence_that_fails_alone_as_well_is_ended_and_no_other() -> None:
    """After two faults one sequence is ended: the others have every token, and wait for it no longer."""
    loop = _Loop("a", "b", "c")
    loop.step()
    loop.poison = "b"
    ends = loop.run()
    assert ends["b"].error is _FAULT
    assert (ends["a"].reason, ends["c"].reason) == (FinishReason.LENGTH,) * 2
    assert loop.said("a") == loop.said("c") == _expected()
    assert loop.said("b") == _expected()[: len(loop.said("b"))]


def test_nobody_joins_while_one_is_to_go_on_alone() -> None:
    """A request that comes meanwhile waits, and is served when all are cleared."""
    loop = _Loop("a", "b")
    loop.step()
    loop.fail()
    loop.submit("d")
    loop.step()
    loop.step()
    assert "d" not in {one.sequence_id for one in only(SequenceAdmitted, loop.events)}
    ends = loop.run()
    assert {one.reason for one in ends.values()} == {FinishReason.LENGTH}
    assert loop.said("d") == _expected()


def test_a_suspect_that_its_client_leaves_holds_nobody_up() -> None:
    """Waiting for its turn or having it: the next one goes on."""
    for left in ("a", "b"):
        loop = _Loop("a", "b", "c")
        loop.step()
        loop.fail()
        loop.events += loop.scheduler.admit(0.0)
        loop.events += loop.scheduler.abort((left,), None, 0.0)
        ends = loop.run()
        assert ends[left].reason is FinishReason.ABORT
        assert {ends[one].reason for one in {*"abc"} - {left}} == {FinishReason.LENGTH}
