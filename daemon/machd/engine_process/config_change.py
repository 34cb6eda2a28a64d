"""A change of the scheduler config, from the request for it until it is in force.

A row keeps the config that it was admitted under, so running sequences are suspended for a change and resumed
under it. A failed change leaves the old config in force with admission
open, and costs no request its answer. Neither does a withdrawn change: a change equal to the config in
force completes at once, and the change before it is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import structlog

from machd.clock import Clock
from machd.engine.protocol.engine import Engine
from machd.engine_process.inbox import (
    Abort,
    ChangeConfig,
    ClearPrefixes,
    Message,
    SetLimits,
    Stop,
    Submit,
)
from machd.engine_process.scheduling import Scheduling
from machd.link.state import ServedState
from machd.scheduler.config import SchedulerConfig
from machd.scheduler.events import Event
from machd.scheduler.scheduler import Scheduler
from machd.scheduler.waiting import QueueLimits


class ConfigChange:
    """A requested scheduler config that is not in force yet. Lives on the engine thread."""

    def __init__(
        self,
        scheduling: Scheduling,
        state: Callable[[], ServedState],
        measure: Callable[[Engine, Scheduler], None],
        clock: Clock,
    ) -> None:
        """Begin without a request.

        Args:
            scheduling: Makes a model's scheduler config from settings.
            state: Returns the state of the loaded model.
            measure: Measures the model anew, while the engine has no rows; it may take in more messages
                meanwhile.
            clock: Reads time.
        """
        self._scheduling = scheduling
        self._state = state
        self._measure = measure
        self._clock = clock
        self._asked: list[ChangeConfig] = []
        self._made: list[ChangeConfig] = []
        self._is_measuring = False
        self._limits: QueueLimits | None = None
        self._error: Exception | None = None
        self._log = structlog.get_logger("machd.scheduler")

    @property
    def is_pending(self) -> bool:
        """Return whether a change is requested, or is being measured."""
        return bool(self._asked) or self._is_measuring

    def take(self, messages: Sequence[Message], scheduler: Scheduler) -> bool:
        """Take messages about the scheduler config, and ignore the others.

        A later request replaces an earlier one, whose futures wait on for the later one.
        Limits apply at once, also to a config that was requested before them.

        Returns:
            Whether the last request equals the config in force: then nothing is left to be done, and
            :meth:`answer` resolves all futures.
        """
        for message in messages:
            self._take(message, scheduler)
        is_asked = any(isinstance(message, ChangeConfig) for message in messages)
        return is_asked and self._is_withdrawn(scheduler)

    def _take(self, message: Message, scheduler: Scheduler) -> None:
        match message:
            case ChangeConfig():
                scheduler.hold_admission()
                self._asked.append(message)
                self._limits = None
            case SetLimits(settings):
                self._limits = self._scheduling.queue_limits(settings)
                scheduler.set_limits(self._limits)
            case Submit() | Abort() | ClearPrefixes() | Stop():
                pass

    def _is_withdrawn(self, scheduler: Scheduler) -> bool:
        """Open admission again if the config in force is the requested one."""
        if self._is_measuring or any(one.is_measured for one in self._asked):
            return False  # what a measurement finds may change what is wanted
        try:
            config = self._wanted(self._asked[-1])
        except Exception:  # noqa: BLE001 - it is asked again, and told, when its turn has come
            return False
        if not scheduler.is_configured_as(config):
            return False
        self._made, self._asked = self._asked, []
        scheduler.set_limits(config.limits)
        scheduler.resume_admission()
        return True

    def wanted(self) -> SchedulerConfig | None:
        """Return the requested config; None if it depends on a measurement to come."""
        if not self._asked or any(one.is_measured for one in self._asked):
            return None
        try:
            return self._wanted(self._asked[-1])
        except Exception:  # noqa: BLE001 - it is asked again, and told, when its turn has come
            return None

    def _wanted(self, asked: ChangeConfig) -> SchedulerConfig:
        config = self._scheduling.config(self._state(), asked.settings)
        if self._limits is not None:
            config = replace(config, limits=self._limits)
        return config

    def make(self, engine: Engine, scheduler: Scheduler) -> list[Event]:
        """Apply the requested config to a scheduler at rest; :meth:`answer` resolves the futures.

        Raises:
            Interruption: The measurement was stopped.
            Exception: The engine's rows cannot be freed.
        """
        self._made, self._asked = self._asked, []
        is_measured = any(one.is_measured for one in self._made)
        try:
            if is_measured:
                self._measure_for_them(engine, scheduler)
                # A config that was requested meanwhile is newer, and needs no further measurement.
                self._made, self._asked = self._made + self._asked, []
            config = self._wanted(self._made[-1])
            # The engine's layout of rows has to agree with the scheduler's reservations.
            engine.reset(max_rows=config.slot_count)
            events = scheduler.apply_config(config, self._clock.monotonic_s())
        except Exception as error:  # noqa: BLE001 - whatever it is, it must not cost anybody an answer
            self._log.exception("scheduler.config_not_changed")
            self._error = error
            if is_measured:
                # Rows of an interrupted measurement have no owner. An engine that cannot free them
                # is given up, as after a failed step.
                engine.reset()
            if not self._asked:  # while it was measured; their turn is next
                scheduler.resume_admission()
            return []
        self._log.info("scheduler.config_changed", mode=config.mode.value, slots=config.slot_count)
        return events

    def _measure_for_them(self, engine: Engine, scheduler: Scheduler) -> None:
        self._is_measuring = True
        try:
            self._measure(engine, scheduler)
        finally:
            self._is_measuring = False

    def answer(self) -> None:
        """Resolve the change's futures, once the new config is visible in the snapshot."""
        made, error = self._made, self._error
        self._made, self._error = [], None
        for one in made:
            one.answer(error)
