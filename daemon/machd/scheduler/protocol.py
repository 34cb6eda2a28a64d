"""What the serving loop asks of a scheduler, whatever its mode."""

from __future__ import annotations

from enum import StrEnum
from typing import Protocol

from machd.engine.protocol.engine import MemoryReading
from machd.engine.protocol.step import StepPlan, StepResult
from machd.errors import MachdError
from machd.scheduler.draft_reading import DraftReading
from machd.scheduler.events import DecodeMode, Event
from machd.scheduler.prefix_cache import PrefixCache
from machd.scheduler.prefix_limits import PrefixLimits
from machd.scheduler.prefix_reading import PrefixReading
from machd.scheduler.sequence import SequenceRequest
from machd.scheduler.shape import Arrangement
from machd.scheduler.waiting import QueueLimits

__all__ = ["MemoryYield", "Scheduler"]


class MemoryYield(StrEnum):
    """What the scheduler gave up for a step that lacked memory."""

    BLOCKS = "blocks"
    """Blocks of the prefix cache."""

    REQUEUED = "requeued"
    """A decode without a token, which waits again."""

    ENDED = "ended"
    """A decode, whose subscribers got OverloadedError."""


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
    def step_mode(self) -> DecodeMode:
        """How the next token is made; of an idle scheduler, how a lonely sequence's would be."""
        ...

    @property
    def draft_reading(self) -> DraftReading:
        """What came of guesses since the start."""
        ...

    @property
    def slot_count(self) -> int:
        """Decodes that can run together."""
        ...

    @property
    def running_count(self) -> int:
        """Sequences that are being answered, those that share a decode included."""
        ...

    @property
    def waiting_count(self) -> int:
        """Sequences that wait for a slot, those that share a decode included."""
        ...

    @property
    def active_loops(self) -> int:
        """Generation loops that are running: occupied slots."""
        ...

    @property
    def is_at_rest(self) -> bool:
        """Whether the engine has no row of a sequence, nor one that it has yet to free."""
        ...

    @property
    def kv_budget_bytes(self) -> int | None:
        """What running decodes may take of the KV cache together; None for no limit."""
        ...

    @property
    def kv_reserved_bytes(self) -> int:
        """What they were promised of it."""
        ...

    @property
    def prefix_reading(self) -> PrefixReading | None:
        """What the prefix cache holds and has done; None without one."""
        ...

    def observe_memory(self, reading: MemoryReading) -> None:
        """Take in what the process has left: the prefix cache and admission make do with it."""
        ...

    def yield_memory(self, missing_bytes: int, now_s: float) -> tuple[MemoryYield, list[Event]]:
        """Give memory back for a step that lacks ``missing_bytes``; the next plan frees it.

        Asked with a decode running. Each call gives something, so that calls come to an end.
        """
        ...

    def set_prefix_cache(self, prefixes: PrefixCache | None) -> None:
        """Keep prompts and answers from now on, or no longer; at rest, the engine holds no block."""
        ...

    def set_prefix_limits(self, limits: PrefixLimits) -> None:
        """Keep less of prompts and answers, or more."""
        ...

    def clear_prefixes(self, *, is_disk_included: bool) -> int:
        """Forget every block that no running sequence holds, in memory and perhaps on disk.

        Returns:
            How many.
        """
        ...

    def submit(self, requests: tuple[SequenceRequest, ...], now_s: float) -> list[Event]:
        """Queue all sequences of one request, or none: then each finishes with the error.

        One that joins a running decode is admitted here and now, and told what it has missed.
        """
        ...

    def abort(
        self, sequence_ids: tuple[str, ...], error: MachdError | None, now_s: float
    ) -> list[Event]:
        """End sequences wherever they are. Ids that are unknown or finished are no fault."""
        ...

    def admit(self, now_s: float) -> list[Event]:
        """Turn away who waited or ran too long, then give free slots to who waits."""
        ...

    def wait_s(self, now_s: float) -> float | None:
        """Seconds until ``admit`` has something to do, asked when ``plan`` is empty.

        0 or more while sequences wait although no step can run (for company, for their timeout, or
        because admission is held); None when there is nothing to wait for, or a step can run.
        """
        ...

    def plan(self) -> StepPlan:
        """The next step; empty when there is nothing to do."""
        ...

    def commit(
        self, plan: StepPlan, result: StepResult, now_s: float, *, duration_s: float
    ) -> list[Event]:
        """Take in what the engine made of ``plan``, and how long its ``run`` took."""
        ...

    def fail(
        self, error: MachdError, now_s: float, *, include_waiting: bool = False
    ) -> list[Event]:
        """End every running sequence with ``error``; the engine has forgotten its slots."""
        ...

    def end_all(self, error: MachdError, now_s: float) -> list[Event]:
        """End every sequence with ``error``, on an engine that works.

        The plans that follow free the slots and see to what is kept of the rows; then they are
        empty.
        """
        ...

    def hold_admission(self) -> None:
        """From now on nobody is given a slot, so that what runs comes to an end.

        All else goes on: sequences are queued, aborted, turned away when they have waited too long,
        and may still join a decode that runs.
        """
        ...

    def resume_admission(self) -> None:
        """Give slots to who waits again."""
        ...

    def set_limits(self, limits: QueueLimits) -> None:
        """Hold whoever comes, waits or runs against other limits.

        Who waits is not turned away because there is less room now.
        """
        ...

    def rearrange(self, arrangement: Arrangement, now_s: float) -> list[Event]:
        """Schedule in another way, at rest, and go on giving slots to who waits.

        They stand where they stood. Only one that the new KV budget can never hold is ended, with
        KvBudgetExceededError.
        """
        ...

    def is_arranged_as(self, arrangement: Arrangement) -> bool:
        """Whether :meth:`rearrange` would change nothing but the limits."""
        ...

    def check_invariants(self, *, is_whole: bool = True) -> None:
        """Assert that slots, queue, sequences and what was promised agree.

        Args:
            is_whole: Whether to look at all that the prefix cache keeps, too, and not only at what
                running sequences hold of it. That takes long where it keeps much: at idle moments.

        Raises:
            AssertionError: They do not; its text says which.
        """
        ...
