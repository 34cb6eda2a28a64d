"""Steps that do not fit into memory, and readings that fail, end no engine thread."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from structlog.testing import capture_logs
from structlog.typing import EventDict
from support.clocks.polling import CEILING_S, wait_until
from support.daemon.engine_thread import running_thread
from support.engines.fake_adapters import FakeAdapterRoom
from support.engines.fake_blocks import BYTES_PER_TOKEN
from support.engines.fake_engine import FakeEngine, FakeFaults, lettered
from support.schedulers.sequence_samples import LIMITS, batching_of, only, outputs_of, request_of

from machd.engine.protocol.engine import Engine
from machd.engine.protocol.step import SampledToken, StepPlan
from machd.errors import OverloadedError
from machd.request.adapter import Adapter
from machd.scheduler.config import continuous
from machd.scheduler.events import (
    EngineFaulted,
    FinishReason,
    SequenceResumed,
    SuspendReason,
)
from machd.scheduler.scheduler import Scheduler

_PROMPT_TOKENS, _MAX_TOKENS = 20, 5
_REQUESTS = 24


@pytest.fixture(name="logged", autouse=True)
def _logged() -> Iterator[list[EventDict]]:
    """Yield what the thread logs."""
    with capture_logs() as entries:
        yield entries


def _batched(engine: Engine) -> Scheduler:
    limits = LIMITS.__class__(
        max_queue=64, max_queue_tokens=100_000, queue_timeout_s=1e6, request_timeout_s=1e6
    )
    config = continuous(limits, batching_of(max_b=8, prefill_chunk_tokens=8))
    return Scheduler(config, None, engine.adapters)


def test_a_load_that_exceeds_memory_is_answered_in_smaller_batches(
    logged: list[EventDict],
) -> None:
    """Room for two of eight sequences: every request is answered rightly, by turns, and no step fails."""
    engine = FakeEngine()
    engine.memory_bytes = 2 * (_PROMPT_TOKENS + _MAX_TOKENS) * BYTES_PER_TOKEN
    requests = [
        request_of(f"r{index}", prompt_tokens=_PROMPT_TOKENS, max_tokens=_MAX_TOKENS)
        for index in range(_REQUESTS)
    ]
    with running_thread(engine, make_scheduler=_batched) as thread:
        for request in requests:
            thread.submit(request)
        ends = thread.published.ends(_REQUESTS)
        events = thread.published.events
        assert thread.loop.is_alive

    for request in requests:
        assert ends[request.sequence_id].reason is FinishReason.LENGTH, "none is overloaded"
        expected = [lettered(request.prompt, request.sampling, i) for i in range(_MAX_TOKENS)]
        tokens = outputs_of(SampledToken, events, request.sequence_id)
        assert [one.token_id for one in tokens] == expected
    assert only(EngineFaulted, events) == []
    assert [one for one in logged if one["event"] == "engine.memory_short"], (
        "the load did exceed it"
    )


def test_memory_that_becomes_less_costs_no_running_request_its_answer() -> None:
    """Five run, and then there is room for two: the others give up their slots behind their tokens, and none is overloaded."""
    steps = [0]

    def shrink(_plan: StepPlan) -> None:
        steps[0] += 1
        if steps[0] == 8:
            engine.memory_bytes = 2 * (4 + 30) * BYTES_PER_TOKEN

    engine = FakeEngine(before_step=shrink)
    requests = [request_of(f"r{number}", max_tokens=30) for number in range(5)]
    with running_thread(engine, make_scheduler=_batched) as thread:
        thread.submit(*requests)
        ends = thread.published.ends(5)
        events = thread.published.events
    assert {one.reason for one in ends.values()} == {FinishReason.LENGTH}
    resumed = only(SequenceResumed, events)
    assert {one.reason for one in resumed} == {SuspendReason.MEMORY}
    for request in requests:
        said = [one.token_id for one in outputs_of(SampledToken, events, request.sequence_id)]
        assert said == [lettered(request.prompt, request.sampling, i) for i in range(30)]


def test_adapters_that_no_row_uses_go_first(logged: list[EventDict]) -> None:
    """A row that fits beside none of them gets its whole answer, and no row loses its slot."""
    engine = FakeEngine()
    engine.adapter_room = FakeAdapterRoom(adapter_bytes=30 * BYTES_PER_TOKEN)
    engine.memory_bytes = 80 * BYTES_PER_TOKEN
    adapted = request_of("adapted", prompt_tokens=10, max_tokens=2)
    adapter = Adapter(b"unused", name="unused")
    adapted = replace(adapted, sampling=replace(adapted.sampling, adapters=(adapter,)))
    with running_thread(engine, make_scheduler=_batched) as thread:
        thread.submit(adapted)
        assert thread.published.ends()["adapted"].error is None
        assert engine.adapter_room.reading().loaded == 1
        thread.submit(request_of("large", prompt_tokens=60))
        ends = thread.published.ends(2)
        events = thread.published.events

    assert ends["large"].error is None
    assert only(SequenceResumed, events) == []
    given = [one["given"] for one in logged if one["event"] == "engine.memory_short"]
    assert given == ["adapters"]
    assert engine.adapter_room.reading().loaded == 0


def test_a_request_that_cannot_fit_alone_is_refused_and_the_next_one_answered() -> None:
    """The thread neither ends nor tries for ever."""
    engine = FakeEngine()
    engine.memory_bytes = 30 * BYTES_PER_TOKEN
    with running_thread(engine, make_scheduler=_batched) as thread:
        thread.submit(request_of("large", prompt_tokens=60))
        assert isinstance(thread.published.ends()["large"].error, OverloadedError)
        thread.submit(request_of("small", prompt_tokens=10))
        assert thread.published.ends(2)["small"].error is None


def test_allocations_that_fail_inside_steps_end_no_thread() -> None:
    """However many steps in a row raise MemoryError, requests get overloaded and others answers.

    Each is tried in the batch and by itself.
    """
    faults = FakeFaults(step_errors={step: MemoryError("planted") for step in range(10)})
    with running_thread(FakeEngine(faults=faults), make_scheduler=_batched) as thread:
        for step in range(5):
            thread.submit(request_of(f"r{step}"))
            assert isinstance(thread.published.ends(step + 1)[f"r{step}"].error, OverloadedError)
        thread.submit(request_of("last"))
        assert thread.published.ends(6)["last"].error is None
        assert only(EngineFaulted, thread.published.events) == []


def test_an_allocation_that_fails_once_costs_no_lone_request_its_answer() -> None:
    """It goes on by itself, where it takes less."""
    faults = FakeFaults(step_errors={2: MemoryError("planted")})
    request = request_of("a", max_tokens=9)
    with running_thread(FakeEngine(faults=faults), make_scheduler=_batched) as thread:
        thread.submit(request)
        assert thread.published.ends()["a"].reason is FinishReason.LENGTH
        said = [one.token_id for one in outputs_of(SampledToken, thread.published.events)]
    assert said == [lettered(request.prompt, request.sampling, i) for i in range(9)]


def test_an_allocation_that_fails_with_several_rows_costs_nobody_the_answer() -> None:
    """All are suspended, half as many run at first, and every token is the one that it would have been."""
    faults = FakeFaults(step_errors={step: MemoryError("planted") for step in (2, 4)})
    requests = [request_of(f"r{number}", max_tokens=9) for number in range(4)]
    with running_thread(FakeEngine(faults=faults), make_scheduler=_batched) as thread:
        thread.submit(*requests)
        ends = thread.published.ends(4)
        events = thread.published.events
    assert {one.reason for one in ends.values()} == {FinishReason.LENGTH}
    for request in requests:
        said = [one.token_id for one in outputs_of(SampledToken, events, request.sequence_id)]
        assert said == [lettered(request.prompt, request.sampling, i) for i in range(9)]
    assert {one.reason for one in only(SequenceResumed, events)} == {SuspendReason.MEMORY}
    assert only(EngineFaulted, events) == []


def test_memory_readings_that_fail_leave_the_last_one_marked_as_stale(
    logged: list[EventDict],
) -> None:
    """Without a file descriptor for a reading, requests are answered all the same."""
    faults = FakeFaults()
    engine = FakeEngine(faults=faults)
    engine.memory_bytes = 1_000_000
    with running_thread(engine) as thread:
        thread.loop.loaded.result(CEILING_S)
        wait_until(lambda: thread.loop.snapshot.memory.step_bytes == 1_000_000, "a reading")
        faults.memory_error = OSError(24, "Too many open files")
        thread.submit(request_of("a"))
        assert thread.published.ends()["a"].error is None
        wait_until(lambda: thread.loop.snapshot.memory.is_stale, "a stale reading")
        assert thread.loop.snapshot.memory.step_bytes == 1_000_000

        faults.memory_error = None
        thread.submit(request_of("b"))
        assert thread.published.ends(2)["b"].error is None
        wait_until(lambda: not thread.loop.snapshot.memory.is_stale, "a reading again")
    assert {one["event"] for one in logged if one["log_level"] == "warning"} == {"memory.not_read"}
