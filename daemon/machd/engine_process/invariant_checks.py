"""Checks of the scheduler's invariants while requests are served."""

from __future__ import annotations

from collections.abc import Callable

import structlog

from machd.clock import Clock
from machd.engine.protocol.memory import MemoryReading
from machd.scheduler.events import Event, InvariantBroken
from machd.scheduler.scheduler import Scheduler

_CHECK_INTERVAL_S = 1.0
"""Interval of checks; invariants are also checked whenever the scheduler becomes idle."""


class InvariantChecks:
    """Checks that the scheduler's books agree, and at an idle moment that the engine holds no KV."""

    def __init__(
        self, publish: Callable[[list[Event]], None], clock: Clock, *, is_strict: bool
    ) -> None:
        """Begin without a check.

        Args:
            publish: Called with the event of a broken invariant.
            clock: Reads time.
            is_strict: Raise for a broken invariant, as in tests; else it is logged and counted while requests go on.
        """
        self._publish = publish
        self._clock = clock
        self._is_strict = is_strict
        self._checked_s = 0.0
        self._log = structlog.get_logger("machd.engine")

    @property
    def is_due(self) -> bool:
        """True once the interval has passed since the last check."""
        return self._clock.monotonic_s() - self._checked_s >= _CHECK_INTERVAL_S

    def check(self, scheduler: Scheduler, memory: MemoryReading, *, idle: bool) -> None:
        """Check the scheduler's invariants, and at an idle moment that the engine holds no KV.

        Raises:
            AssertionError: An invariant is broken, and invariants are strict.
        """
        self._checked_s = self._clock.monotonic_s()
        try:
            scheduler.check_invariants(is_whole=idle)
            left_bytes = memory.kv_used_bytes if idle else 0
            assert left_bytes == 0, f"{left_bytes} bytes of KV cache are left and nobody runs"
        except AssertionError as error:
            if self._is_strict:
                raise
            self._log.error("scheduler.invariant_broken", detail=str(error), exc_info=error)
            self._publish([InvariantBroken(str(error))])
