"""Sequences wait for their adapters without holding others up, and without being passed for ever."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from support.engines.fake_engine import FakeEngine
from support.schedulers.sequence_samples import LIMITS, batching_of, request_of

from machd.engine.protocol.adapters import Holding
from machd.engine.protocol.memory import AdapterReading
from machd.engine.protocol.step import Lane, StepResult
from machd.errors import AdapterError
from machd.request.adapter import Adapter
from machd.scheduler.config import BATCHED_ADAPTERS, AdapterPolicy, continuous
from machd.scheduler.events import FinishReason, SequenceAdmitted, SequenceFinished
from machd.scheduler.scheduler import Scheduler
from machd.scheduler.subscriber import SequenceRequest

A, B, C = (Adapter(name.encode(), name=name) for name in "abc")


class Room:
    """Adapters that come when a test says so; ``max_loaded`` at once."""

    def __init__(self, max_loaded: int = 2) -> None:
        self.max_loaded = max_loaded
        self.broken: set[Adapter] = set()
        self.ready: set[Adapter] = set()
        self.holders: dict[Adapter, int] = {}
        self.used_bytes = 0
        self.has_layers_left = False
        self.limits_s: list[float] = []

    def load(self, limit_s: float) -> bool:
        """Note how long layers may get adapters."""
        self.limits_s.append(limit_s)
        return self.has_layers_left

    def hold(self, adapters: Sequence[Adapter]) -> Holding:
        """Hold what is ready, as long as there is room."""
        (adapter,) = adapters
        if adapter in self.broken:
            raise AdapterError(f"{adapter.name} is broken")
        if adapter not in self.holders:
            unused = [one for one, count in self.holders.items() if not count]
            if len(self.holders) >= self.max_loaded and not unused:
                return Holding.NO_ROOM
            if len(self.holders) >= self.max_loaded:
                del self.holders[unused[0]]
            self.holders[adapter] = 0
        if adapter not in self.ready:
            return Holding.LOADING
        self.holders[adapter] += 1
        return Holding.HELD

    def release(self, adapters: Sequence[Adapter]) -> None:
        """Count down."""
        for one in adapters:
            self.holders[one] -= 1
            assert self.holders[one] >= 0, "given back once"

    def drop_unused(self, missing_bytes: int) -> bool:
        """Drop nothing."""
        del missing_bytes
        return False

    def reading(self) -> AdapterReading:
        """Return the bytes that a test has set."""
        return AdapterReading(used_bytes=self.used_bytes)


def asking(name: str, *adapters: Adapter) -> SequenceRequest:
    """A request that is to be computed with adapters."""
    request = request_of(name)
    return replace(request, sampling=replace(request.sampling, adapters=adapters))


def scheduler_with(
    room: Room,
    *requests: SequenceRequest,
    coalesce: bool = False,
    policy: AdapterPolicy = BATCHED_ADAPTERS,
) -> Scheduler:
    """A scheduler of four slots in whose queue the requests wait."""
    config = replace(continuous(LIMITS, batching_of(coalesce=coalesce)), adapters=policy)
    made = Scheduler(config, None, room)
    for one in requests:
        made.submit((one,), 0.0)
    return made


def admitted(scheduler: Scheduler) -> list[str]:
    """Admit what can be, and name it."""
    events = scheduler.admit(0.0)
    scheduler.check_invariants()
    return [one.sequence_id for one in events if isinstance(one, SequenceAdmitted)]


def test_a_sequence_whose_adapter_is_on_its_way_lets_others_pass() -> None:
    """Base rows and rows whose adapters are there begin before it; it begins once its adapter is there."""
    room = Room()
    room.ready = {B}
    scheduler = scheduler_with(room, asking("1", A), asking("2", B), asking("3"))
    assert admitted(scheduler) == ["2", "3"]
    assert admitted(scheduler) == []
    room.ready.add(A)
    assert admitted(scheduler) == ["1"]
    assert room.holders == {A: 1, B: 1}


def test_a_sequence_without_room_for_its_adapter_is_passed_by_base_rows_alone() -> None:
    """Where all adapters are in use, a later row of one of them waits behind it: it would be passed for ever."""
    room = Room(max_loaded=1)
    room.ready = {A, B}
    scheduler = scheduler_with(room, asking("1", A), asking("2", B), asking("3", A), asking("4"))
    assert admitted(scheduler) == ["1", "4"]
    scheduler.abort(("1",), None, 0.0)
    assert admitted(scheduler) == ["2"]
    scheduler.abort(("2",), None, 0.0)
    assert admitted(scheduler) == ["3"]


def test_an_adapter_that_cannot_be_used_ends_its_own_sequences() -> None:
    """They fail with its reason; those behind them run."""
    room = Room()
    room.broken, room.ready = {A}, {B}
    scheduler = scheduler_with(room, asking("1", A), asking("2", B), asking("3", A))
    events = scheduler.admit(0.0)
    ended = [one for one in events if isinstance(one, SequenceFinished)]
    assert [(one.sequence_id, one.reason) for one in ended] == [
        ("1", FinishReason.ERROR),
        ("3", FinishReason.ERROR),
    ]
    assert all(isinstance(one.error, AdapterError) for one in ended)
    assert scheduler.running_count == 1
    scheduler.check_invariants()


def test_adapters_are_given_back_when_a_row_ends_or_has_no_room() -> None:
    """Nothing holds an adapter but rows that run."""
    room = Room()
    room.ready = {A, B}
    one = asking("1", A)
    scheduler = Scheduler(continuous(LIMITS, batching_of(budget_tokens=30)), None, room)
    scheduler.submit((one,), 0.0)
    assert admitted(scheduler) == ["1"]
    scheduler.submit((asking("2", B),), 0.0)
    room.used_bytes = 10**9
    assert admitted(scheduler) == []
    assert room.holders == {A: 1, B: 0}
    scheduler.abort(("1",), None, 0.0)
    assert admitted(scheduler) == ["2"], "alone it has the whole budget"
    scheduler.abort(("2",), None, 0.0)
    assert not any(room.holders.values())


def test_an_idle_scheduler_asks_again_soon_while_adapters_load() -> None:
    """Nothing wakes the engine thread when an adapter is there, and a row waits for it."""
    room = Room()
    scheduler = scheduler_with(room, asking("1", A))
    assert admitted(scheduler) == []
    wait_s = scheduler.wait_s(0.0)
    assert wait_s is not None
    assert 0 < wait_s < 0.05
    room.ready.add(A)
    assert admitted(scheduler) == ["1"]


def test_an_idle_scheduler_does_not_rest_while_layers_get_adapters() -> None:
    """The rest of a load goes on at once, with a look at the inbox in between."""
    room = Room()
    room.has_layers_left = True
    scheduler = scheduler_with(room, asking("1", A))
    assert admitted(scheduler) == []
    assert scheduler.wait_s(0.0) == 0.0


@pytest.mark.parametrize(
    ("step_s", "limit_s"),
    [(0.001, 0.002), (0.1, 0.02), (1.0, 0.05)],
    ids=["short", "usual", "long"],
)
def test_a_load_takes_a_share_of_a_step_between_two(step_s: float, limit_s: float) -> None:
    """A fifth of the last step, within bounds: rows that decode wait for no whole load."""
    room, engine = Room(), FakeEngine()
    scheduler = scheduler_with(room, asking("1"))
    assert admitted(scheduler) == ["1"]
    plan = scheduler.plan()
    scheduler.commit(plan, engine.run(plan), 0.0, duration_s=step_s)
    admitted(scheduler)
    assert room.limits_s[-1] == pytest.approx(limit_s)


def test_requests_of_different_adapters_are_not_joined() -> None:
    """Equal requests of one adapter share a sequence; those of another one, or of another scale, never."""
    room = Room(max_loaded=4)
    room.ready = {A, B, replace(A, scale=0.5)}
    halved = replace(A, scale=0.5)
    requests = [asking("1", A), asking("2", A), asking("3", B), asking("4", halved)]
    scheduler = scheduler_with(room, *requests, coalesce=True)
    admitted(scheduler)
    assert scheduler.running_count == 4
    assert scheduler.active_loops == 3


def test_rows_with_adapters_run_alone_where_a_batch_of_them_was_not_measured() -> None:
    """One at a time in the serial lane, beside rows of the base in the batch."""
    room = Room()
    room.ready = {A, B}
    policy = AdapterPolicy(is_batched=False)
    scheduler = scheduler_with(room, asking("1", A), asking("2"), asking("3", B), policy=policy)

    assert admitted(scheduler) == ["1", "2"]
    assert [one.lane for one in scheduler._running] == [Lane.SERIAL, Lane.BATCH]
    assert room.holders[B] == 0, "a row that waits keeps no adapter in memory"
    scheduler.abort(("1",), None, 0.0)
    assert admitted(scheduler) == ["3"]


def test_rows_with_adapters_end_with_the_reason_where_they_are_refused() -> None:
    """Rows of the base behind them run; a later config without the refusal takes adapters again."""
    room = Room()
    room.ready = {A}
    policy = AdapterPolicy(refusal="it was measured to be wrong")
    scheduler = scheduler_with(room, asking("1", A), asking("2"), policy=policy)

    events = scheduler.admit(0.0)

    ends = {one.sequence_id: one.error for one in events if isinstance(one, SequenceFinished)}
    assert [*ends] == ["1"]
    assert isinstance(ends["1"], AdapterError)
    assert "measured to be wrong" in str(ends["1"])
    assert scheduler.running_count == 1
    assert not room.holders
    allowed = continuous(LIMITS, batching_of())
    assert not scheduler.is_configured_as(allowed)
    scheduler.abort(("2",), None, 0.0)
    scheduler.commit(scheduler.plan(), StepResult(), 0.0, duration_s=0.0)
    scheduler.apply_config(allowed, 0.0)
    scheduler.submit((asking("3", A),), 0.0)
    assert admitted(scheduler) == ["3"]


@pytest.mark.parametrize("name", ["other", ""])
def test_names_do_not_tell_adapters_apart(name: str) -> None:
    """The same files under two names are one adapter."""
    assert replace(A, name=name, path="/elsewhere") == A
    assert hash(replace(A, name=name)) == hash(A)
