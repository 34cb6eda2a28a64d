"""Held admission and a new config: waiting sequences keep their place and their timeouts."""

from __future__ import annotations

import pytest
from support.engines.fake_engine import FakeEngine
from support.schedulers.sequence_samples import LIMITS, batching_of, only, request_of, run_step

from machd.errors import KvBudgetExceededError, QueueFullError, QueueTimeoutError
from machd.scheduler.admission import KvPolicy
from machd.scheduler.config import SchedulerConfig, continuous, single_flight
from machd.scheduler.events import DecodeMode, SequenceAdmitted, SequenceFinished, SequenceQueued
from machd.scheduler.scheduler import Scheduler
from machd.scheduler.waiting import QueueLimits

SINGLE = single_flight(LIMITS)


def _batched(
    max_b: int = 4,
    *,
    limits: QueueLimits = LIMITS,
    window_s: float = 0.0,
    coalesce: bool = False,
    budget_tokens: int = 100_000,
    policy: KvPolicy = KvPolicy.DEFER,
) -> SchedulerConfig:
    return continuous(
        limits,
        batching_of(
            max_b=max_b,
            window_s=window_s,
            coalesce=coalesce,
            budget_tokens=budget_tokens,
            policy=policy,
        ),
    )


def _holding(config: SchedulerConfig, *sequence_ids: str) -> Scheduler:
    """A scheduler that holds admission, before which these wait."""
    core = Scheduler(config)
    core.hold_admission()
    for sequence_id in sequence_ids:
        core.submit((request_of(sequence_id),), 0.0)
    return core


def _admitted(core: Scheduler, now_s: float = 0.0) -> list[str]:
    return [one.sequence_id for one in only(SequenceAdmitted, core.admit(now_s))]


def test_held_admission_admits_none_and_resumes_in_order() -> None:
    """Free slots stay free until admission is resumed."""
    core = _holding(_batched(2), "a", "b", "c")
    assert _admitted(core) == []
    core.resume_admission()
    assert _admitted(core) == ["a", "b"]


def test_held_admission_ends_nothing_that_runs() -> None:
    """A running sequence comes to its end, and then the scheduler is at rest."""
    core, engine = Scheduler(_batched()), FakeEngine()
    core.submit((request_of("a", max_tokens=2),), 0.0)
    core.admit(0.0)
    core.hold_admission()
    core.submit((request_of("b"),), 0.0)
    ends: list[SequenceFinished] = []
    while not core.is_at_rest:
        ends += only(SequenceFinished, run_step(core, engine, 0.0))
    assert [one.sequence_id for one in ends] == ["a"]
    assert (core.waiting_count, engine.memory().kv_used_bytes) == (1, 0)


def test_a_row_that_the_engine_has_to_free_is_no_rest() -> None:
    """An aborted decode's row is still in the engine until the next step."""
    core, engine = Scheduler(_batched()), FakeEngine()
    core.submit((request_of("a"),), 0.0)
    run_step(core, engine, 0.0)
    core.abort(("a",), None, 0.0)
    assert (core.running_count, core.is_at_rest) == (0, False)
    with pytest.raises(AssertionError, match="rows that run"):
        core.apply_config(SINGLE, 0.0)
    run_step(core, engine, 0.0)
    assert core.is_at_rest


def test_a_newcomer_may_join_a_decode_that_runs_while_admission_is_held() -> None:
    """It takes no slot and prolongs nothing."""
    core, engine = Scheduler(_batched(coalesce=True)), FakeEngine()
    core.submit((request_of("a"),), 0.0)
    run_step(core, engine, 0.0)
    core.hold_admission()
    events = core.submit((request_of("b"),), 0.0)
    assert isinstance(events[0], SequenceAdmitted)
    assert core.active_loops == 1


def test_held_admission_wakes_for_timeouts_alone() -> None:
    """With empty slots there is nothing to do before the next timeout: no spinning."""
    core = _holding(_batched(window_s=1.0), "a")
    assert core.wait_s(4.0) == LIMITS.queue_timeout_s - 4.0
    [end] = only(SequenceFinished, core.admit(LIMITS.queue_timeout_s))
    assert isinstance(end.error, QueueTimeoutError)
    assert core.wait_s(LIMITS.queue_timeout_s) is None


@pytest.mark.parametrize("config", [SINGLE, _batched(3)], ids=["single", "batched"])
def test_those_that_wait_keep_their_order(config: SchedulerConfig) -> None:
    """They are seated in the order in which they would have been, as many as there are slots."""
    core = _holding(_batched(2), *"abcd")
    assert core.apply_config(config, 1.0) == []
    core.check_invariants()
    slots = config.slot_count
    assert (core.mode, core.slot_count) == (config.mode, slots)
    assert _admitted(core, 1.0) == list("abcd"[:slots])


def test_waiting_for_a_switch_counts_as_waiting_for_company() -> None:
    """A sequence that waited longer than the window is admitted at once; a single new one waits."""
    core = _holding(SINGLE, "a")
    core.apply_config(_batched(window_s=1.0), 2.0)
    assert _admitted(core, 2.0) == ["a"]
    idle = Scheduler(SINGLE)
    idle.apply_config(_batched(window_s=1.0), 2.0)
    idle.submit((request_of("b", arrived_s=2.0),), 2.0)
    assert _admitted(idle, 2.5) == []
    assert _admitted(idle, 3.0) == ["b"]


@pytest.mark.parametrize("policy", list(KvPolicy))
def test_only_what_can_never_fit_is_ended(policy: KvPolicy) -> None:
    """One that is larger than the budget ends; those that merely do not fit together wait."""
    core = _holding(SINGLE, "a", "b")
    core.submit((request_of("large", max_tokens=50),), 0.0)
    [end] = only(SequenceFinished, core.apply_config(_batched(budget_tokens=8, policy=policy), 0.0))
    assert (end.sequence_id, type(end.error)) == ("large", KvBudgetExceededError)
    core.check_invariants()
    assert core.waiting_count == 2
    assert _admitted(core) == ["a"]
    assert core.kv_budget_bytes == 80


def test_smaller_limits_turn_away_newcomers_alone() -> None:
    """Four wait where one may: they go on waiting, and the next one is refused."""
    none = QueueLimits(0, 0, LIMITS.queue_timeout_s, LIMITS.request_timeout_s)
    core = _holding(SINGLE, *"abcd")
    assert core.apply_config(_batched(2, limits=none), 0.0) == []
    [end] = core.submit((request_of("e"),), 0.0)
    assert isinstance(end, SequenceFinished)
    assert isinstance(end.error, QueueFullError)
    assert core.waiting_count == 4


def test_limits_alone_may_change_while_rows_run() -> None:
    """A shorter timeout holds for those that wait already."""
    core = Scheduler(SINGLE)
    core.submit((request_of("a"),), 0.0)
    core.submit((request_of("b"),), 0.0)
    core.admit(0.0)
    core.set_limits(QueueLimits(8, 1000, 2.0, LIMITS.request_timeout_s))
    [end] = only(SequenceFinished, core.admit(2.0))
    assert (end.sequence_id, type(end.error)) == ("b", QueueTimeoutError)
    assert "(2 s)" in str(end.error)


def test_no_subscriber_joins_once_coalescing_is_off() -> None:
    """Subscribers of one sequence stay; the next identical request gets a sequence of its own."""
    core = _holding(_batched(coalesce=True), "a", "b")
    core.apply_config(_batched(), 0.0)
    assert isinstance(core.submit((request_of("c"),), 0.0)[0], SequenceQueued)
    core.check_invariants()
    core.admit(0.0)
    assert (core.running_count, core.active_loops) == (3, 2)


def test_what_came_before_sharing_was_switched_on_is_not_joined() -> None:
    """Its tokens are not kept; the first newcomer sequences for itself, and is joined by the next."""
    core = _holding(SINGLE, "a", "b")
    core.apply_config(_batched(coalesce=True), 0.0)
    core.submit((request_of("c"),), 0.0)
    core.submit((request_of("d"),), 0.0)
    core.check_invariants()
    core.admit(0.0)
    assert (core.running_count, core.active_loops) == (4, 3)


def test_the_decode_mode_is_that_of_the_config_that_admits() -> None:
    """A sequence queued in one decode mode is admitted in the other."""
    core = _holding(SINGLE, "a")
    core.apply_config(_batched(), 0.0)
    [admitted] = only(SequenceAdmitted, core.admit(0.0))
    assert admitted.decode_mode is DecodeMode.BATCHED
