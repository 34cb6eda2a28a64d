"""Why sequences wait, in situations that were planted."""

from __future__ import annotations

from support.schedulers.sequence_samples import LIMITS, batching_of, request_of
from unit.scheduler.test_adapter_admission import A, B, Room, asking, scheduler_with

from machd.scheduler.config import SchedulerConfig, continuous
from machd.scheduler.scheduler import Scheduler
from machd.scheduler.waits import WaitReason


def _reasons(scheduler: Scheduler, *sequence_ids: str) -> list[WaitReason]:
    """Admit what can be, and say what each of the others waits for."""
    scheduler.admit(0.0)
    return [scheduler.waits.of([one]) for one in sequence_ids]


def _scheduler(config: SchedulerConfig, *names: str, prompt_tokens: int = 4) -> Scheduler:
    made = Scheduler(config)
    for name in names:
        made.submit((request_of(name, prompt_tokens=prompt_tokens),), 0.0)
    return made


def test_sequences_behind_a_full_batch_wait_for_a_slot() -> None:
    """All of them: each begins when one of those that run has ended."""
    scheduler = _scheduler(continuous(LIMITS, batching_of(max_b=2)), *"abcd")
    assert _reasons(scheduler, "c", "d") == [WaitReason.SLOT, WaitReason.SLOT]


def test_the_first_without_room_in_the_kv_budget_waits_for_memory_and_others_for_their_turn() -> (
    None
):
    """There are slots; the ones behind it must not take what it waits for."""
    config = continuous(LIMITS, batching_of(budget_tokens=20))
    scheduler = _scheduler(config, *"abcd", prompt_tokens=12)
    assert scheduler.waiting_count == 4
    reasons = _reasons(scheduler, "b", "c", "d")
    assert scheduler.slot_count - scheduler.active_loops > 0
    assert reasons == [WaitReason.MEMORY, WaitReason.TURN, WaitReason.TURN]


def test_fewer_slots_after_memory_ran_out_are_memory() -> None:
    """A slot is free that is not given away, because a step did not fit."""
    scheduler = _scheduler(continuous(LIMITS, batching_of(max_b=2)), "a", "b")
    scheduler.admit(0.0)
    scheduler.yield_memory(1, 0.0)
    waiting = "b" if "b" in scheduler.waits.others or scheduler.running_count == 1 else "a"
    assert _reasons(scheduler, waiting) == [WaitReason.MEMORY]
    assert waiting in scheduler.waits.others, "one that was suspended is told by its id"


def test_adapters_that_load_and_adapters_in_use_are_waited_for() -> None:
    """Whether its files are being read, or those in memory are all in use."""
    loading = Room()
    assert _reasons(scheduler_with(loading, asking("1", A)), "1") == [WaitReason.ADAPTER]
    in_use = Room(max_loaded=1)
    in_use.ready = {A, B}
    scheduler = scheduler_with(in_use, asking("1", A), asking("2", B))
    assert _reasons(scheduler, "2") == [WaitReason.ADAPTER]
    scheduler.abort(("1",), None, 0.0)
    scheduler.admit(0.0)
    assert not scheduler.waits.others, "it runs"


def test_a_window_and_a_change_of_config_are_turns() -> None:
    """Nothing is short: company is awaited, or the engine comes to rest."""
    scheduler = _scheduler(continuous(LIMITS, batching_of(window_s=1.0)), "a")
    assert _reasons(scheduler, "a") == [WaitReason.TURN]
    held = _scheduler(continuous(LIMITS, batching_of()), "a")
    held.hold_admission()
    assert _reasons(held, "a") == [WaitReason.TURN]
