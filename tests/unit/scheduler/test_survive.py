"""Sequences after a failed step: all are resumed, one at a time at first, and one that fails alone is to blame."""

from __future__ import annotations

import pytest
from support.schedulers.scheduler_loop import FAULT, SchedulerLoop, completion_of
from support.schedulers.sequence_samples import (
    only,
    request_of,
)

from machd.scheduler.events import (
    FinishReason,
    SequenceAdmitted,
    SequenceResumed,
    SuspendReason,
)
from machd.scheduler.subscriber import SequenceRequest

_TOKENS = 6


def _request(name: str) -> SequenceRequest:
    """A request that comes by its letter."""
    arrived_s = (ord(name) - ord("a")) / 100
    return request_of(name, max_tokens=_TOKENS, arrived_s=arrived_s)


def _loop(*names: str) -> SchedulerLoop:
    """A scheduler in which these wait."""
    loop = SchedulerLoop()
    loop.submit(*map(_request, names))
    return loop


_COMPLETION = completion_of(_request("a"))


@pytest.mark.parametrize("steps", range(1, 5))
def test_a_fault_costs_nobody_a_token(steps: int) -> None:
    """Whenever it comes: each goes on alone for a token, then all together, behind what they had said."""
    loop = _loop("a", "b", "c")
    for _ in range(steps):
        loop.step()
    loop.fail()
    del loop.widths[:]
    ends = loop.run()
    assert {one.reason for one in ends.values()} == {FinishReason.LENGTH}
    for name in "abc":
        assert loop.said(name) == _COMPLETION, name
    resumed = only(SequenceResumed, loop.events)
    assert {one.reason for one in resumed} <= {SuspendReason.FAULT}
    assert loop.widths[:3] == [1, 1, 1], "one suspect at a time"
    assert max(loop.widths) == 3, "then all together"


def test_who_fails_alone_as_well_is_ended_and_no_other() -> None:
    """Two faults convict one: the others have every token, and nobody is asked to wait for it again."""
    loop = _loop("a", "b", "c")
    loop.step()
    loop.poison = "b"
    ends = loop.run()
    assert ends["b"].error is FAULT
    assert (ends["a"].reason, ends["c"].reason) == (FinishReason.LENGTH,) * 2
    assert loop.said("a") == loop.said("c") == _COMPLETION
    assert loop.said("b") == _COMPLETION[: len(loop.said("b"))]


def test_nobody_joins_while_one_is_to_go_on_alone() -> None:
    """A request that comes meanwhile waits, and is served when all are cleared."""
    loop = _loop("a", "b")
    loop.step()
    loop.fail()
    loop.submit(_request("d"))
    loop.step()
    loop.step()
    assert "d" not in {one.sequence_id for one in only(SequenceAdmitted, loop.events)}
    ends = loop.run()
    assert {one.reason for one in ends.values()} == {FinishReason.LENGTH}
    assert loop.said("d") == _COMPLETION


def test_a_suspect_that_its_client_leaves_holds_nobody_up() -> None:
    """Waiting for its turn or having it: the next one goes on."""
    for left in ("a", "b"):
        loop = _loop("a", "b", "c")
        loop.step()
        loop.fail()
        loop.events += loop.scheduler.admit(0.0)
        loop.events += loop.scheduler.abort((left,), None, 0.0)
        ends = loop.run()
        assert ends[left].reason is FinishReason.ABORT
        assert {ends[one].reason for one in {*"abc"} - {left}} == {FinishReason.LENGTH}
