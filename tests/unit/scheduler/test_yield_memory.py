"""Memory yielded for a failed step, and the limit of running sequences after it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.engines.fake_blocks import BYTES_PER_TOKEN
from support.engines.fake_engine import FakeEngine
from support.schedulers.scheduler_loop import completion_of, run_to_end, tokens_of
from support.schedulers.sequence_samples import (
    LIMITS,
    batching_of,
    only,
    request_of,
    run_step,
)

from machd.engine.protocol.memory import MemoryReading
from machd.engine.protocol.step import Lane
from machd.errors import EngineFaultError, MachdError, OverloadedError, RequestTimeoutError
from machd.scheduler.config import continuous, single_flight
from machd.scheduler.events import (
    FinishReason,
    SequenceAdmitted,
    SequenceFinished,
    SequenceResumed,
    SuspendReason,
)
from machd.scheduler.prefix_cache import PrefixCache
from machd.scheduler.prefix_limits import BlockCosts, PrefixConfig, PrefixLimits
from machd.scheduler.scheduler import Scheduler
from machd.scheduler.suspensions import MemoryYield

_READING = MemoryReading(0, 0, 0, 0)


def _running(*sequence_ids: str, max_b: int = 4, prompt_tokens: int = 40) -> Scheduler:
    """A scheduler whose sequences have slots and no tokens."""
    scheduler = Scheduler(continuous(LIMITS, batching_of(max_b=max_b, prefill_chunk_tokens=8)))
    for index, sequence_id in enumerate(sequence_ids):
        request = request_of(sequence_id, arrived_s=index / 100, prompt_tokens=prompt_tokens)
        scheduler.submit((request,), 0.0)
    scheduler.admit(0.0)
    return scheduler


def test_yield_memory_suspends_the_youngest_sequence_without_a_token() -> None:
    """It loses its slot, not its place in the queue; its subscribers hear nothing of it."""
    scheduler = _running("a", "b", "c")

    assert scheduler.yield_memory(1, 0.0) == (MemoryYield.SUSPENDED, [])

    scheduler.check_invariants()
    assert (scheduler.running_count, scheduler.waiting_count) == (2, 1)
    assert scheduler.plan().release == (2,)


def test_a_suspended_sequence_computes_its_prompt_anew() -> None:
    """Nothing of what the engine has forgotten counts as computed: its answer is that of any other."""
    scheduler, engine = _running("a", prompt_tokens=4), FakeEngine()
    run_step(scheduler, engine, 0.0)
    request = replace(request_of("b", prompt_tokens=40), arrived_s=1.0)
    scheduler.submit((request,), 1.0)
    run_step(scheduler, engine, 1.0)
    assert scheduler.plan().prefill[0].start > 0, "a part of the prompt is computed"

    assert scheduler.yield_memory(1, 1.0) == (MemoryYield.SUSPENDED, [])

    events = run_to_end(scheduler, engine, now_s=1.0)
    assert tokens_of("b", events) == completion_of(request)


def test_yield_memory_suspends_the_youngest_sequence_when_all_have_tokens() -> None:
    """It goes on behind them: no token is told twice, and none is missing."""
    scheduler, engine = _running("a", "b", prompt_tokens=4), FakeEngine()
    events = run_step(scheduler, engine, 0.0)

    assert scheduler.yield_memory(1, 0.0) == (MemoryYield.SUSPENDED, [])

    scheduler.check_invariants()
    assert (scheduler.running_count, scheduler.waiting_count) == (1, 1)
    events += run_to_end(scheduler, engine)
    (resumed,) = only(SequenceResumed, events)
    assert (resumed.sequence_id, resumed.completion_tokens) == ("b", 1)
    assert resumed.reason is SuspendReason.MEMORY
    assert tokens_of("b", events) == completion_of(request_of("b"))
    ends = [(one.sequence_id, one.reason) for one in only(SequenceFinished, events)]
    assert ends == [("a", FinishReason.LENGTH), ("b", FinishReason.LENGTH)]


def test_a_suspended_sequence_with_tokens_waits_as_long_as_a_request_may() -> None:
    """The queue timeout applies only before the first token; an abort ends a waiting sequence."""
    scheduler, engine = _running("a", "b", "c", prompt_tokens=4), FakeEngine()
    run_step(scheduler, engine, 0.0)
    scheduler.hold_admission()
    scheduler.suspend()
    scheduler.check_invariants()
    assert only(SequenceFinished, run_step(scheduler, engine, LIMITS.queue_timeout_s + 1)) == []
    assert scheduler.is_at_rest
    (aborted,) = only(SequenceFinished, scheduler.abort(("b",), None, 20.0))
    assert (aborted.reason, aborted.completion_tokens) == (FinishReason.ABORT, 1)
    late = only(SequenceFinished, scheduler.admit(LIMITS.request_timeout_s + 1))
    assert {type(one.error) for one in late} == {RequestTimeoutError}
    scheduler.check_invariants()
    assert not scheduler.waiting_count


def test_identical_requests_do_not_join_a_suspended_sequence_with_tokens() -> None:
    """They would have to be told what they missed once it runs again."""
    scheduler = Scheduler(continuous(LIMITS, batching_of(coalesce=True)))
    engine = FakeEngine()
    scheduler.submit((request_of("a", namespace="x"),), 0.0)
    run_step(scheduler, engine, 0.0)
    scheduler.suspend()
    scheduler.submit((request_of("b", namespace="x"),), 0.0)
    scheduler.check_invariants()
    events = run_to_end(scheduler, engine)
    assert {one.sequence_id for one in only(SequenceAdmitted, events)} == {"b"}
    assert [one.sequence_id for one in only(SequenceResumed, events)] == ["a"]


def test_a_sequence_that_does_not_fit_alone_goes_on_in_the_serial_lane() -> None:
    """There its keys and values are not copied into the batch's arrays; later ones join the batch beside it."""
    scheduler, engine = _running("a", prompt_tokens=4), FakeEngine()
    events = run_step(scheduler, engine, 0.0)
    assert scheduler.yield_memory(1, 0.0) == (MemoryYield.SUSPENDED, [])
    scheduler.check_invariants()
    events += scheduler.admit(0.0)
    assert [chunk.lane for chunk in scheduler.plan().prefill] == [Lane.SERIAL]
    events += run_to_end(scheduler, engine)
    assert tokens_of("a", events) == completion_of(request_of("a"))


def test_yield_memory_ends_a_sequence_that_does_not_fit_into_the_serial_lane_either() -> None:
    """Nothing else could make room for it, so waiting would not help."""
    scheduler = _running("a")
    assert scheduler.yield_memory(1, 0.0) == (MemoryYield.SUSPENDED, [])
    scheduler.check_invariants()
    assert scheduler.plan().release == (0,)
    run_step(scheduler, FakeEngine(), 0.0)
    given, events = scheduler.yield_memory(1, 0.0)
    assert given is MemoryYield.ENDED
    assert [one.sequence_id for one in only(SequenceFinished, events)] == ["a"]
    assert scheduler.active_loops == 0


def test_fewer_decodes_run_after_a_yield_until_one_has_finished() -> None:
    """A suspended sequence is not admitted into the same shortage."""
    scheduler, engine = _running("a", "b", "c"), FakeEngine()
    scheduler.yield_memory(1, 0.0)
    assert only(SequenceAdmitted, scheduler.admit(0.0)) == []

    admitted: list[str] = []
    for _ in range(100):
        events = run_step(scheduler, engine, 0.0)
        scheduler.check_invariants()
        admitted += [one.sequence_id for one in only(SequenceAdmitted, events)]
        if not scheduler.running_count + scheduler.waiting_count:
            break
    assert admitted == ["c"]


@pytest.mark.parametrize(
    ("error", "admitted"), [(OverloadedError("planted"), 2), (EngineFaultError("planted"), 4)]
)
def test_a_smaller_batch_runs_after_an_allocation_failed(error: MachdError, admitted: int) -> None:
    """Half as many sequences as were too many together are admitted at first."""
    scheduler = _running("a", "b", "c", "d")
    scheduler.fail(error, 0.0)
    for sequence_id in "efgh":
        scheduler.submit((request_of(sequence_id),), 0.0)
    assert len(only(SequenceAdmitted, scheduler.admit(0.0))) == admitted


def test_admission_beside_others_waits_for_memory() -> None:
    """A sequence is promised what it may come to hold: it waits while that is not left."""
    scheduler = Scheduler(continuous(LIMITS, batching_of(max_b=4)))
    for sequence_id in "abc":
        scheduler.submit((request_of(sequence_id, prompt_tokens=40, max_tokens=10),), 0.0)
    # 50 positions of 10 bytes each: one sequence fits, and one runs whatever is left.
    scheduler.observe_memory(replace(_READING, step_bytes=999))
    assert [one.sequence_id for one in only(SequenceAdmitted, scheduler.admit(0.0))] == ["a"]

    scheduler.observe_memory(replace(_READING, step_bytes=1000))
    assert [one.sequence_id for one in only(SequenceAdmitted, scheduler.admit(0.0))] == ["b"]


def test_yield_memory_evicts_cached_blocks_first() -> None:
    """No request pays for a shortage while blocks of the prefix cache can be dropped."""
    shape = PrefixConfig(b"fake", 8, BlockCosts(BYTES_PER_TOKEN))
    prefixes = PrefixCache(shape, PrefixLimits(max_bytes=1_000_000))
    scheduler, engine = Scheduler(single_flight(LIMITS), prefixes), FakeEngine()
    scheduler.submit((request_of("a", prompt_tokens=40, max_tokens=1),), 0.0)
    while scheduler.running_count + scheduler.waiting_count or not scheduler.plan().is_empty:
        run_step(scheduler, engine, 0.0)
    # Another text, so that the running row holds none of the blocks.
    other = replace(request_of("b"), prompt=tuple(range(100, 140)))
    scheduler.submit((other,), 0.0)
    run_step(scheduler, engine, 0.0)
    held_bytes = prefixes.reading.bytes

    assert scheduler.yield_memory(10 * BYTES_PER_TOKEN, 0.0) == (MemoryYield.BLOCKS, [])

    assert prefixes.reading.bytes <= held_bytes - 10 * BYTES_PER_TOKEN
    assert scheduler.running_count == 1
    scheduler.check_invariants()
