"""What the serving loop asks of a scheduler, whatever its mode."""

from __future__ import annotations

from typing import Protocol

from machd.engine.protocol import StepPlan, StepResult
from machd.errors import MachdError
from machd.scheduler.events import DecodeMode, Event
from machd.scheduler.sequence import SequenceRequest

__all__ = ["Scheduler"]


class Scheduler(Protocol):
    """Waiting and running sets, changed only by these verbs. Time comes in as ``now_s``.

    One step is ``admit``, ``plan``, the engine's ``run``, ``commit``. ``plan`` changes nothing, so a
    run that fails leaves the state it was planned from.
    """

    @property
    def mode(self) -> DecodeMode:
        """How sequences decode at the most."""
        ...

    @property
    def slot_count(self) -> int:
        """Sequences that can run together."""
        ...

    @property
    def running_count(self) -> int:
        """Sequences in slots."""
        ...

    @property
    def waiting_count(self) -> int:
        """Sequences that wait for one."""
        ...

    @property
    def active_loops(self) -> int:
        """Generation loops that are running."""
        ...

    def submit(self, requests: tuple[SequenceRequest, ...], now_s: float) -> list[Event]:
        """Queue all sequences of one request, or none: then each finishes with the error."""
        ...

    def abort(
        self, sequence_ids: tuple[str, ...], error: MachdError | None, now_s: float
    ) -> list[Event]:
        """End sequences wherever they are. Ids that are unknown or finished are no fault."""
        ...

    def admit(self, now_s: float) -> list[Event]:
        """Turn away who waited or ran too long, then give free slots to who waits."""
        ...

    def plan(self) -> StepPlan:
        """The next step; empty when there is nothing to do."""
        ...

    def commit(self, plan: StepPlan, result: StepResult, now_s: float) -> list[Event]:
        """Take in what the engine made of ``plan``."""
        ...

    def fail(
        self, error: MachdError, now_s: float, *, include_waiting: bool = False
    ) -> list[Event]:
        """End every running sequence with ``error``; the engine has forgotten its slots."""
        ...

    def check_invariants(self) -> None:
        """Assert that slots, queue and sequences agree; run at idle moments."""
        ...
