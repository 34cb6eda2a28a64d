"""Another way of scheduling, from the moment it is asked for until it is in force.

A row keeps the arrangement that it was admitted under, so a change waits until nothing runs. Who
waits meanwhile goes on waiting, and whatever goes wrong leaves the old arrangement, with admission
open: a change that failed costs nobody an answer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import structlog

from machd.clock import Clock
from machd.engine.protocol import Engine
from machd.errors import MachdError
from machd.scheduler.events import Event
from machd.scheduler.protocol import Scheduler
from machd.scheduler.waiting import QueueLimits
from machd.serving.inbox import Abort, Message, Rearrange, SetLimits, Stop, Submit

__all__ = ["Rearrangement"]


class Rearrangement:
    """What was asked for and is not done yet. Lives on the engine thread."""

    def __init__(self, measure: Callable[[Engine], None], clock: Clock) -> None:
        """Begin with nothing asked for.

        Args:
            measure: Finds out anew what the model can do; the engine has no rows then.
            clock: Reads time.
        """
        self._measure = measure
        self._clock = clock
        self._asked: list[Rearrange] = []
        self._made: list[Rearrange] = []
        self._limits: QueueLimits | None = None
        self._error: Exception | None = None
        self._log = structlog.get_logger("machd.scheduler")

    @property
    def is_pending(self) -> bool:
        """Whether anything is asked for."""
        return bool(self._asked)

    def take(self, message: Message, scheduler: Scheduler) -> None:
        """Take in one that is about how to schedule; the others are not its business.

        A later wish comes in place of an earlier one, and whoever waits for that one waits on.
        Limits hold at once, and also for what was asked for before them, which does not know them.
        """
        match message:
            case Rearrange():
                scheduler.hold_admission()
                self._asked.append(message)
                self._limits = None
            case SetLimits(limits):
                scheduler.set_limits(limits)
                self._limits = limits
            case Submit() | Abort() | Stop():
                pass

    def make(self, engine: Engine, scheduler: Scheduler) -> list[Event]:
        """Do what was asked for; the scheduler is at rest. :meth:`answer` says how it went.

        Raises:
            Exception: The engine cannot be put back to where it has no rows.
        """
        self._made, self._asked = self._asked, []
        is_measured = any(one.is_measured for one in self._made)
        try:
            if is_measured:
                self._measure(engine)
            arrangement = self._made[-1].arrange(engine)
            if self._limits is not None:
                arrangement = replace(arrangement, limits=self._limits)
            # What the engine lays out for its rows has to be what the scheduler reserves for them.
            engine.reset(max_rows=arrangement.shape.slot_count)
            events = scheduler.rearrange(arrangement, self._clock.monotonic_s())
        except Exception as error:  # noqa: BLE001 - whatever it is, it must not cost anybody an answer
            self._log.exception("scheduler.not_rearranged")
            self._error = error
            if is_measured:
                # Rows of a measurement that broke off are nobody's. An engine that cannot forget
                # them is given up, as after a step that failed.
                engine.reset()
            scheduler.resume_admission()
            return []
        shape = arrangement.shape
        self._log.info("scheduler.rearranged", mode=shape.mode.value, slots=shape.slot_count)
        return events

    def answer(self) -> None:
        """Tell those for whom it was made, once everybody else can see it."""
        made, error = self._made, self._error
        self._made, self._error = [], None
        for one in made:
            if error is None:
                one.done.set_result(None)
            else:
                one.done.set_exception(error)

    def refuse(self, error: MachdError) -> None:
        """Tell all who wait that it will never be done."""
        self._made += self._asked
        self._asked, self._error = [], error
        self.answer()
