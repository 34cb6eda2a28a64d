"""Steps of the engine: computed, and gone on after when one does not fit into memory or fails."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import structlog

from machd.clock import Clock
from machd.engine.protocol.engine import Engine
from machd.engine.protocol.memory import StepMemoryError
from machd.engine.protocol.step import RowFault, StepPlan
from machd.engine_process.loop_snapshot import Pulse
from machd.errors import EngineFaultError, OverloadedError, RequestError
from machd.scheduler.events import EngineFaulted, Event, SequenceFinished, StepCompleted
from machd.scheduler.scheduler import Scheduler
from machd.scheduler.suspensions import MemoryYield

_MAX_CONSECUTIVE_FAULTS = 6
"""Failed steps without a whole answer between them after which the engine is given up. A request that crashes every
step takes two."""


_STORE_ROWS_S = 2.0
"""Time to store blocks of rows that end with the daemon; queued blocks are written to disk after that."""


class Steps:
    """Computes planned steps, and counts those that fail in a row. Lives on the engine thread."""

    def __init__(self, publish: Callable[[list[Event]], None], pulse: Pulse, clock: Clock) -> None:
        """Begin without a failed step.

        Args:
            publish: Called with the events of a failed step, before anything else can fail, and of steps that store blocks.
            pulse: Beats while blocks are stored.
            clock: Reads time.
        """
        self._publish = publish
        self._pulse = pulse
        self._clock = clock
        self._consecutive_faults = 0
        self._log = structlog.get_logger("machd.engine")

    def run(self, engine: Engine, scheduler: Scheduler, plan: StepPlan) -> list[Event]:
        """Compute a step, and return its events.

        Raises:
            EngineFaultError: Too many steps in a row have failed, or the rows could not be removed after one.
        """
        start_s = self._clock.monotonic_s()
        try:
            result = engine.run(plan)
        except StepMemoryError as shortage:
            return self._free_memory(engine, scheduler, plan, shortage)
        except Exception as error:  # noqa: BLE001 - any failure of a step is an engine fault, logged there
            return self._recover(engine, scheduler, error)
        now_s = self._clock.monotonic_s()
        duration_s = now_s - start_s
        if faults := result.faults:
            left = tuple(one for one in faults if not self._makes_room(scheduler, one))
            result = replace(result, faults=left)
        for fault in faults:
            fault.release_frames()
        for draft_fault in result.draft_faults:
            self._log.warning(
                "speculation.failed",
                slot_index=draft_fault.slot_index,
                exc_info=draft_fault.cause,
            )
        events = scheduler.commit(plan, result, now_s, duration_s=duration_s)
        self.note_answers(events)
        if plan.prefill or plan.decode:
            # Counted from the result: a new row may decode in the step of its prompt's end.
            rows = {token.slot_index for token in result.tokens}
            rows |= {fault.slot_index for fault in result.faults}
            width = max(len(plan.decode), len(rows))
            accepted_tokens = sum(one.accepted_tokens for one in result.drafts)
            ahead_tokens = len(result.tokens) - len({one.slot_index for one in result.tokens})
            events.append(
                StepCompleted(
                    width,
                    plan.prefill_tokens,
                    duration_s,
                    max(0, ahead_tokens - accepted_tokens),  # a row that failed has none
                    sum(one.drafted_tokens for one in result.drafts),
                    accepted_tokens,
                )
            )
        return events

    def _free_memory(
        self, engine: Engine, scheduler: Scheduler, plan: StepPlan, shortage: StepMemoryError
    ) -> list[Event]:
        """Make room for a step that the engine has refused; it is planned again after that.

        The rows and blocks that the plan itself frees are freed first.
        """
        freeing = replace(plan, prefill=(), decode=(), encode=())
        if not freeing.is_empty:
            return self.run(engine, scheduler, freeing)
        missing_bytes = shortage.needed_bytes - shortage.left_bytes
        given, events = scheduler.yield_memory(missing_bytes, self._clock.monotonic_s())
        self._log.warning(
            "engine.memory_short",
            needed_bytes=shortage.needed_bytes,
            left_bytes=shortage.left_bytes,
            given=given.value,
        )
        return events

    def _makes_room(self, scheduler: Scheduler, fault: RowFault) -> bool:
        """Log a row's fault, and make room for an image that does not fit, which is then planned again.

        Returns:
            False if the fault ends the row.
        """
        if isinstance(fault.cause, RequestError):
            return False  # the client's error is in its request's log line
        if not isinstance(fault.cause, StepMemoryError):
            self._log.error("row.failed", slot_index=fault.slot_index, exc_info=fault.cause)
            return False
        needed_bytes, left_bytes = fault.cause.needed_bytes, fault.cause.left_bytes
        unused = scheduler.yield_unused(needed_bytes - left_bytes)
        self._log.warning(
            "engine.memory_short",
            needed_bytes=needed_bytes,
            left_bytes=left_bytes,
            given=(unused or MemoryYield.ENDED).value,
        )
        return unused is not None

    def finish_blocks(self, engine: Engine, scheduler: Scheduler) -> None:
        """Store the last answer's blocks, so that the disk tier gets them."""
        while not scheduler.active_loops and not (plan := scheduler.plan()).is_empty:
            self._publish(self.run(engine, scheduler, plan))

    def store_rows(self, engine: Engine, scheduler: Scheduler) -> None:
        """Store the blocks of rows that ran until the end."""
        until_s = self._clock.monotonic_s() + _STORE_ROWS_S
        while not (plan := scheduler.plan()).is_empty and self._clock.monotonic_s() < until_s:
            self._pulse.beat()
            self._publish(self.run(engine, scheduler, plan))

    def note_answers(self, events: list[Event]) -> None:
        """A whole answer shows that the engine works: prefill may succeed where decode fails.

        An answer that its client ended, by a stop string or by disconnecting, counts as whole.
        """
        for event in events:
            if isinstance(event, SequenceFinished) and not event.error and event.completion_tokens:
                self._consecutive_faults = 0

    def _recover(self, engine: Engine, scheduler: Scheduler, error: Exception) -> list[Event]:
        """Suspend every running request, and start the engine's rows afresh.

        They are resumed one at a time at first; one that fails alone as well is ended. After an allocation
        that failed inside a step the next batch is half as large.

        Raises:
            EngineFaultError: Too many steps in a row have failed, or the reset itself did.
        """
        if isinstance(error, MemoryError):
            self._log.error("engine.step_failed", exc_info=error, in_a_row=0)
            events: list[Event] = []
            if not scheduler.suspend_half():
                overloaded = OverloadedError(
                    "the server has too little memory left for this request"
                )
                events = scheduler.fail(overloaded, self._clock.monotonic_s())
            engine.reset()
            return events
        self._consecutive_faults += 1
        fault = EngineFaultError("the engine failed while computing this request")
        # Before anything else can fail.
        self._publish([EngineFaulted(), *scheduler.survive(fault, self._clock.monotonic_s())])
        self._log.error("engine.step_failed", exc_info=error, in_a_row=self._consecutive_faults)
        if self._consecutive_faults >= _MAX_CONSECUTIVE_FAULTS:
            raise EngineFaultError(
                f"{self._consecutive_faults} steps in a row have failed"
            ) from error
        engine.reset()
        return []
