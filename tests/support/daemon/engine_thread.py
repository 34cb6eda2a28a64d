"""An engine thread with a scripted engine, and all that it says."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TypeAlias, TypeVar

from machd.clock import Clock
from machd.engine.protocol.engine import Engine
from machd.engine_process.loop import EngineLoop
from machd.engine_process.startup_guard import Probe
from machd.errors import DrainDeadlineError, MachdError
from machd.link.state import ServedState
from machd.scheduler.config import SchedulerConfig, single_flight
from machd.scheduler.events import Event, SequenceFinished
from machd.scheduler.prefix_limits import PrefixLimits
from machd.scheduler.scheduler import Scheduler
from machd.scheduler.subscriber import SequenceRequest
from machd.scheduler.waiting import QueueLimits
from machd.settings.model import Settings
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


def single_flight_of(_engine: Engine) -> Scheduler:
    """One at a time, in short chunks."""
    return Scheduler(single_flight(LIMITS, prefill_chunk_tokens=CHUNK_TOKENS))


Wanted: TypeAlias = SchedulerConfig | Callable[[], SchedulerConfig]


class ScriptedScheduling:
    """Configs and limits that a test asks for; each stands behind settings of its own."""

    def __init__(self, make_scheduler: Callable[[Engine], Scheduler] = single_flight_of) -> None:
        """Begin with a scheduler."""
        self._make_scheduler = make_scheduler
        self._wanted: list[tuple[Settings, Wanted | QueueLimits]] = []

    def asking_for(self, wanted: Wanted | QueueLimits) -> Settings:
        """Return settings that ask for a config or for limits."""
        self._wanted.append((Settings(), wanted))
        return self._wanted[-1][0]

    def scheduler(self, engine: Engine, state: ServedState, settings: Settings) -> Scheduler:
        """The scheduler that the test makes."""
        del state, settings
        return self._make_scheduler(engine)

    def config(self, state: ServedState, settings: Settings) -> SchedulerConfig:
        """The config that these settings ask for."""
        del state
        (wanted,) = (one for asked, one in self._wanted if asked is settings)
        assert not isinstance(wanted, QueueLimits)
        return wanted if isinstance(wanted, SchedulerConfig) else wanted()

    def queue_limits(self, settings: Settings) -> QueueLimits:
        """The limits that these settings ask for."""
        (wanted,) = (one for asked, one in self._wanted if asked is settings)
        assert isinstance(wanted, QueueLimits)
        return wanted

    def prefix_limits(self, state: ServedState, settings: Settings) -> PrefixLimits:
        """No block is kept."""
        del state, settings
        return PrefixLimits(max_bytes=0, max_entries=0, left_bytes=0)

    def adopt(
        self,
        engine: Engine,
        scheduler: Scheduler,
        state: ServedState,
        settings: Settings,
        now_s: float,
    ) -> list[Event]:
        """Whatever is known of the model, the scheduler stays as it is."""
        del engine, scheduler, state, settings, now_s
        return []


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
        self._scheduling = ScriptedScheduling(make_scheduler)
        self.loop = EngineLoop(
            load=load,
            scheduling=self._scheduling,
            settings=Settings(),
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

    def change_config(self, wanted: Wanted, *, measure: bool = False) -> Future[None]:
        """Ask for another scheduler config."""
        return self.loop.change_config(self._scheduling.asking_for(wanted), measure=measure)

    def set_queue_limits(self, limits: QueueLimits) -> None:
        """Ask for other bounds of the queue."""
        self.loop.set_limits(self._scheduling.asking_for(limits))

    def fault(self) -> BaseException | None:
        """Why the thread ended, once it has."""
        return self.loop.finished.exception(CEILING_S)


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
