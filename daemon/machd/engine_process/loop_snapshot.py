"""The engine thread's heartbeat, and its newest counts, for other threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import structlog

from machd.clock import Clock
from machd.engine.protocol.engine import Engine
from machd.engine.protocol.memory import MemoryReading
from machd.link.snapshot import LoopSnapshot
from machd.scheduler.scheduler import Scheduler

_MAX_MEASUREMENT_S = 120.0
"""Longest time of a measurement, which has its own limit, before it counts as hung."""


class Pulse:
    """The time of the engine thread's last heartbeat; written by it, read by any thread."""

    def __init__(
        self, clock: Clock, on_beat: Callable[[float], None] = lambda _allowed_s: None
    ) -> None:
        """Begin with a beat that is not reported.

        Args:
            clock: Reads time.
            on_beat: Called at each beat with the extra time until the next one.
        """
        self._clock = clock
        self._on_beat = on_beat
        self._allowed_s = 0.0
        self._last_s = clock.monotonic_s()

    @property
    def age_s(self) -> float:
        """Seconds since the last beat, minus the extra time of a measurement."""
        return max(0.0, self._clock.monotonic_s() - self._last_s - self._allowed_s)

    def beat(self) -> None:
        """Note a heartbeat."""
        self._last_s = self._clock.monotonic_s()
        self._on_beat(self._allowed_s)

    @contextmanager
    def measurement(self) -> Iterator[None]:
        """Allow extra time for a measurement inside the context."""
        self._allowed_s = _MAX_MEASUREMENT_S
        self.beat()
        try:
            yield
        finally:
            self._allowed_s = 0.0
            self.beat()


_MEMORY_INTERVAL_S = 1.0
"""Interval of memory readings while steps run."""


class Snapshots:
    """The newest snapshot and the newest at rest; taken by the engine thread, read by any thread."""

    def __init__(self, clock: Clock) -> None:
        """Begin with empty counts."""
        self._clock = clock
        self._log = structlog.get_logger("machd.engine")
        self._memory_read_s = 0.0
        self.newest = LoopSnapshot()
        self.idle = LoopSnapshot()

    def take(
        self, engine: Engine, scheduler: Scheduler, *, idle: bool, is_changing_config: bool
    ) -> None:
        """Take a snapshot; read memory when nothing runs, else once a second.

        The scheduler gets the process's free memory.
        """
        now_s = self._clock.monotonic_s()
        memory, prefix = self.newest.memory, self.newest.prefix
        if idle or now_s - self._memory_read_s >= _MEMORY_INTERVAL_S:
            memory = self._read_memory(engine)
            self._memory_read_s = now_s
            scheduler.observe_memory(memory)
            prefix = scheduler.prefix_reading
        self.newest = LoopSnapshot(
            taken_unix_s=self._clock.unix_s(),
            mode=scheduler.mode,
            slot_count=scheduler.slot_count,
            running_count=scheduler.running_count,
            waiting_count=scheduler.waiting_count,
            active_loops=scheduler.active_loops,
            kv_budget_bytes=scheduler.kv_budget_bytes,
            kv_reserved_bytes=scheduler.kv_reserved_bytes,
            memory=memory,
            is_changing_config=is_changing_config,
            prefix=prefix,
            step_mode=scheduler.step_mode,
            drafts=scheduler.draft_reading,
            prefilled_tokens=scheduler.prefilled_tokens,
            waits=scheduler.waits,
        )
        if idle:
            self.idle = self.newest

    def _read_memory(self, engine: Engine) -> MemoryReading:
        """Return the engine's memory, or the last reading if reading fails, which is no engine fault."""
        try:
            return engine.memory()
        except Exception as error:  # noqa: BLE001 - whatever a reading of the system raises
            self._log.warning("memory.not_read", exc_info=error)
            return replace(self.newest.memory, is_stale=True)
