"""An engine thread with a scripted engine, and all that it says."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from machd.clock import Clock
from machd.engine.protocol.engine import Engine
from machd.engine_process.loop import EngineLoop
from machd.engine_process.startup_guard import Probe
from machd.errors import DrainDeadlineError, MachdError
from machd.scheduler.config import single_flight
from machd.scheduler.events import Event, SequenceFinished
from machd.scheduler.scheduler import Scheduler
from machd.scheduler.subscriber import SequenceRequest
from support.clocks.manual_clock import ManualClock
from support.clocks.polling import CEILING_S
from support.engines.fake_engine import FakeEngine
from support.engines.step_gate import StepGate
from support.schedulers.sequence_samples import LIMITS, only

CHUNK_TOKENS = 4
STOPPED = DrainDeadlineError("stopped")

_T = TypeVar("_T")


class Published:
    """Everything the engine thread said, readable from the test's thread."""

    def __init__(self) -> None:
        """Nothing yet."""
        self._changed = threading.Condition()
        self.events: list[Event] = []
        self.threads: set[str] = set()

    def __call__(self, events: list[Event]) -> None:
        """Take a step's events."""
        with self._changed:
            self.events += events
            self.threads.add(threading.current_thread().name)
            self._changed.notify_all()

    def of(self, kind: type[_T]) -> list[_T]:
        """Events of one kind so far."""
        return only(kind, self.events)

    def wait_for(self, kind: type[_T], count: int = 1) -> list[_T]:
        """Events of one kind, as soon as there are ``count``."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.of(kind)) >= count, CEILING_S), (
                f"not {count} of {kind.__name__} within {CEILING_S:g} s: {self.events}"
            )
            return self.of(kind)

    def ends(self, count: int = 1) -> dict[str, SequenceFinished]:
        """Return how sequences ended, by id, as soon as ``count`` have."""
        return {one.sequence_id: one for one in self.wait_for(SequenceFinished, count)}


class Thread:
    """An engine loop with what it published."""

    def __init__(
        self,
        load: Callable[[], Engine],
        make_scheduler: Callable[[Engine], Scheduler],
        clock: Clock,
        *,
        strict_invariants: bool = True,
        probe: Probe | None = None,
    ) -> None:
        """Prepare it."""
        self.published = Published()
        self.loop = EngineLoop(
            load=load,
            make_scheduler=make_scheduler,
            publish=self.published,
            clock=clock,
            strict_invariants=strict_invariants,
            probe=probe,
        )

    def submit(self, *requests: SequenceRequest) -> None:
        """One request."""
        self.loop.submit(requests)

    def abort(self, *sequence_ids: str, error: MachdError | None = None) -> None:
        """End sequences."""
        self.loop.abort(sequence_ids, error)

    def fault(self) -> BaseException | None:
        """Why the thread ended, once it has."""
        return self.loop.finished.exception(CEILING_S)


def single_flight_of(_engine: Engine) -> Scheduler:
    """One at a time, in short chunks."""
    return Scheduler(single_flight(LIMITS, prefill_chunk_tokens=CHUNK_TOKENS))


@contextmanager
def running_thread(
    engine: Engine | None = None,
    *,
    load: Callable[[], Engine] | None = None,
    make_scheduler: Callable[[Engine], Scheduler] = single_flight_of,
    clock: Clock | None = None,
    gate: StepGate | None = None,
    strict_invariants: bool = True,
    probe: Probe | None = None,
) -> Iterator[Thread]:
    """A started thread that has ended when the block has."""
    loaded = engine or FakeEngine()
    thread = Thread(
        load or (lambda: loaded),
        make_scheduler,
        clock or ManualClock(0.0),
        strict_invariants=strict_invariants,
        probe=probe,
    )
    thread.loop.start()
    try:
        yield thread
    finally:
        if gate is not None:
            gate.open()
        thread.loop.stop(STOPPED)
        assert thread.loop.join(CEILING_S), "the engine thread did not end"
