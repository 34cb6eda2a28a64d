"""Suspensions: running sequences go back to the queue, and are resumed from there.

Memory is missing, an engine has lost its rows, or another config is to be applied.
"""

from __future__ import annotations

from enum import StrEnum

from machd.engine.protocol.adapters import AdapterRoom
from machd.engine.protocol.step import Lane, StepResult
from machd.errors import MachdError, OverloadedError
from machd.scheduler.config import SchedulerConfig
from machd.scheduler.events import Event, SuspendReason
from machd.scheduler.open_sequences import OpenSequences


class MemoryYield(StrEnum):
    """Concession of the scheduler to a step without enough memory."""

    ADAPTERS = "adapters"
    """Adapters that no row uses."""

    BLOCKS = "blocks"
    """Blocks of the prefix cache."""

    SUSPENDED = "suspended"
    """A sequence's slot; it waits to be resumed."""

    ENDED = "ended"
    """A sequence, which failed with OverloadedError."""


class Suspensions:
    """Rules by which running sequences are suspended, or end where they cannot go on."""

    def __init__(self, sequences: OpenSequences, adapters: AdapterRoom) -> None:
        """Start with the sequences to suspend."""
        self._open = sequences
        self._adapters = adapters

    def yield_memory(self, missing_bytes: int, now_s: float) -> tuple[MemoryYield, list[Event]]:
        """Give up memory for a step that lacks ``missing_bytes``; the next plan frees it.

        What no row uses goes first. Without any, the youngest sequence is suspended. One that runs
        alone goes on in the serial lane, and ends with OverloadedError if it does not fit there either. From
        then on one sequence fewer runs; each that finishes allows one more. Every call gives up something, so a
        caller may repeat it until the step fits.
        """
        running = self._open.running
        unused = self.yield_unused(missing_bytes)
        if unused is not None:
            return unused, []
        running.limit_to(len(running) - 1)
        youngest = running.youngest
        if self._shrink():
            self._open.suspend(youngest, SuspendReason.MEMORY, is_sound=False)
            return MemoryYield.SUSPENDED, []
        error = OverloadedError(
            "the server has too little memory left for this request; try again later",
            retry_after_s=self._open.waiting.retry_after_s(),
        )
        return MemoryYield.ENDED, self._open.fail(error, [youngest], now_s, is_sound=False)

    def yield_unused(self, missing_bytes: int) -> MemoryYield | None:
        """Give up adapters that no row uses, else blocks of the prefix cache, which the next plan frees; None if there are neither."""
        if self._adapters.drop_unused(missing_bytes):
            return MemoryYield.ADAPTERS
        prefixes = self._open.running.prefixes
        if prefixes is not None and prefixes.yield_bytes(missing_bytes):
            return MemoryYield.BLOCKS
        return None

    def suspend(self, config: SchedulerConfig | None) -> None:
        """Suspend running sequences for another config; the next plan frees their slots.

        What they have computed stays in the prefix cache. A sequence that could never run under ``config`` goes
        on to its end; None where that is not known.
        """
        for sequence in tuple(self._open.running):
            if config is None or config.has_room_for(sequence.reserved_tokens):
                self._open.suspend(sequence, SuspendReason.CONFIG, is_sound=True)

    def suspend_half(self) -> bool:
        """Suspend every running sequence on an engine that has lost its rows, and let half as many run.

        Returns:
            False if one runs that cannot take less, which is left as it is.
        """
        running = self._open.running
        if not self._shrink():
            return False
        running.limit_to(len(running) // 2)
        for sequence in tuple(running):
            self._open.suspend(sequence, SuspendReason.MEMORY, is_sound=False)
        running.forget_rows()
        return True

    def survive(self, error: MachdError, now_s: float) -> list[Event]:
        """Suspend every running sequence on an engine that has lost its rows in a step that failed.

        Each is a suspect until it has gone on alone for a token. One that was a suspect already, and so ran
        alone, is to blame: it ends with ``error``.
        """
        running = self._open.running
        to_blame = [one for one in running if one.is_suspect]
        for sequence in tuple(running):
            if not sequence.is_suspect:
                sequence.is_suspect = True
                self._open.suspend(sequence, SuspendReason.FAULT, is_sound=False)
        events = self._open.fail(error, to_blame, now_s, is_sound=False)
        running.forget_rows()
        return events

    def clear_suspects(self, result: StepResult) -> None:
        """Clear a suspect that has got a token alone; it waits while others still have to."""
        for token in result.tokens:
            sequence = self._open.running.slots.at(token.slot_index)
            if sequence is None or not sequence.is_suspect:
                continue
            sequence.is_suspect = False
            if self._open.waiting.suspect is not None:
                self._open.suspend(sequence, SuspendReason.FAULT, is_sound=True)

    def _shrink(self) -> bool:
        """Have a sequence that runs alone in the batch go on in the serial lane; returns False if nothing can take less.

        Several take less by running one after another.
        """
        running = tuple(self._open.running)
        if len(running) == 1 and running[0].lane is Lane.BATCH:
            running[0].needs_serial_lane = True
            return True
        return len(running) > 1
