"""One generation at a time; everyone else waits in a bounded queue."""

from __future__ import annotations

from machd.engine.protocol import SampledToken, StepPlan, StepResult
from machd.errors import (
    MachdError,
    QueueFullError,
    QueueTimeoutError,
    RequestTimeoutError,
    RowFaultError,
)
from machd.scheduler.events import (
    DecodeMode,
    Event,
    FinishReason,
    SequenceAdmitted,
    SequenceFinished,
    SequenceQueued,
    TokenGenerated,
)
from machd.scheduler.plan import plan_step
from machd.scheduler.sequence import Sequence, SequenceRequest, SequenceState
from machd.scheduler.slots import Slots
from machd.scheduler.waiting import QueueLimits, WaitingQueue

__all__ = ["PREFILL_CHUNK_TOKENS", "SingleFlightScheduler"]

PREFILL_CHUNK_TOKENS = 512
"""Prompt tokens between two looks at the inbox: what an abort during prefill has to wait for."""


class SingleFlightScheduler:
    """The safe default: one slot, first come, first served."""

    def __init__(
        self, limits: QueueLimits, *, prefill_chunk_tokens: int = PREFILL_CHUNK_TOKENS
    ) -> None:
        """Start idle."""
        self._limits = limits
        self._prefill_chunk_tokens = prefill_chunk_tokens
        self._waiting = WaitingQueue(limits)
        self._slots = Slots(1)

    @property
    def mode(self) -> DecodeMode:
        """Always single."""
        return DecodeMode.SINGLE

    @property
    def slot_count(self) -> int:
        """Always one."""
        return 1

    @property
    def running_count(self) -> int:
        """Zero or one."""
        return len(self._slots)

    @property
    def waiting_count(self) -> int:
        """Sequences in the queue."""
        return len(self._waiting)

    @property
    def active_loops(self) -> int:
        """One generation loop for each running sequence."""
        return len(self._slots)

    def submit(self, requests: tuple[SequenceRequest, ...], now_s: float) -> list[Event]:
        """Queue all sequences of one request, or finish each of them with QueueFullError."""
        sequences = tuple(Sequence(request) for request in requests)
        try:
            self._waiting.check_room(sequences, free_slots=self._slots.free_count)
        except QueueFullError as error:
            return [sequence.finish(FinishReason.ERROR, now_s, error) for sequence in sequences]
        return [
            SequenceQueued(sequence.sequence_id, self._waiting.append(sequence))
            for sequence in sequences
        ]

    def abort(
        self, sequence_ids: tuple[str, ...], error: MachdError | None, now_s: float
    ) -> list[Event]:
        """End sequences wherever they are; unknown ids are no fault."""
        events: list[Event] = []
        for sequence_id in sequence_ids:
            if sequence_id in self._waiting:
                sequence = self._waiting.remove(sequence_id)
                events.append(sequence.finish(FinishReason.ABORT, now_s, error))
            elif (running := self._slots.find(sequence_id)) is not None:
                events.append(self._finish(running, FinishReason.ABORT, now_s, error))
        return events

    def admit(self, now_s: float) -> list[Event]:
        """Turn away who waited or ran too long, then seat the next one if the slot is free."""
        events: list[Event] = list(self._expire(now_s))
        if self._waiting and self._slots.free_count:
            sequence = self._waiting.pop_first()
            slot_index = self._slots.occupy(sequence, now_s)
            self._waiting.start_group(sequence.request.group_id)
            events.append(
                SequenceAdmitted(
                    sequence.sequence_id, slot_index, self.mode, self.active_loops, now_s
                )
            )
        return events

    def plan(self) -> StepPlan:
        """A chunk of the prompt, or the next token."""
        return plan_step(self._slots, prefill_chunk_tokens=self._prefill_chunk_tokens)

    def commit(self, plan: StepPlan, result: StepResult, now_s: float) -> list[Event]:
        """Take in the step's tokens and faults."""
        self._slots.confirm_released(plan.release)
        for chunk in plan.prefill:
            prefilled = self._slots.at(chunk.slot_index)
            assert prefilled is not None, "a slot is only left between steps"
            prefilled.prefilled_tokens += len(chunk.token_ids)
        events: list[Event] = []
        for token in result.tokens:
            events.extend(self._take(token, now_s))
        for fault in result.faults:
            sequence = self._slots.at(fault.slot_index)
            assert sequence is not None, "a fault belongs to a running row"
            error = RowFaultError("the generation failed inside the server")
            error.__cause__ = fault.cause
            events.append(self._finish(sequence, FinishReason.ERROR, now_s, error))
        return events

    def fail(
        self, error: MachdError, now_s: float, *, include_waiting: bool = False
    ) -> list[Event]:
        """End the running sequence with ``error``; who waits goes on waiting unless included."""
        events: list[Event] = [
            self._finish(sequence, FinishReason.ERROR, now_s, error) for sequence in self._slots
        ]
        self._slots.confirm_released(self._slots.released)
        while include_waiting and self._waiting:
            sequence = self._waiting.pop_first()
            events.append(sequence.finish(FinishReason.ERROR, now_s, error))
        return events

    def check_invariants(self) -> None:
        """Assert that slots, queue and sequences agree."""
        for sequence in self._slots:
            assert sequence.state is SequenceState.RUNNING, "only running sequences hold slots"
            assert self._slots.at(sequence.slot_index or 0) is sequence, "slot indices agree"
        prompt_tokens = 0
        for sequence in self._waiting:
            assert sequence.state is SequenceState.WAITING, "only waiting sequences queue"
            prompt_tokens += len(sequence.request.prompt)
        assert prompt_tokens == self._waiting.prompt_tokens, "queued tokens add up"

    def _take(self, token: SampledToken, now_s: float) -> list[Event]:
        sequence = self._slots.at(token.slot_index)
        assert sequence is not None, "a token belongs to a running row"
        sequence.count_token()
        if token.token_id in sequence.request.stop_token_ids:
            return [self._finish(sequence, FinishReason.STOP, now_s)]
        events: list[Event] = [TokenGenerated(sequence.sequence_id, token, now_s)]
        if sequence.completion_tokens == sequence.request.max_tokens:
            events.append(self._finish(sequence, FinishReason.LENGTH, now_s))
        return events

    def _expire(self, now_s: float) -> list[SequenceFinished]:
        events = []
        for sequence in self._waiting.expired(now_s):
            self._waiting.remove(sequence.sequence_id)
            error = self._ran_too_long() if sequence.is_group_started else self._waited_too_long()
            events.append(sequence.finish(FinishReason.ERROR, now_s, error))
        oldest_s = now_s - self._limits.request_timeout_s
        for sequence in self._slots:
            if sequence.request.arrived_s <= oldest_s:
                error = self._ran_too_long()
                events.append(self._finish(sequence, FinishReason.ERROR, now_s, error))
        return events

    def _waited_too_long(self) -> MachdError:
        return QueueTimeoutError(
            f"no slot became free within limits.queue_timeout_s "
            f"({self._limits.queue_timeout_s:g} s)",
            retry_after_s=self._waiting.retry_after_s(),
        )

    def _ran_too_long(self) -> MachdError:
        return RequestTimeoutError(
            f"the request ran longer than limits.request_timeout_s "
            f"({self._limits.request_timeout_s:g} s)"
        )

    def _finish(
        self,
        sequence: Sequence,
        reason: FinishReason,
        now_s: float,
        error: MachdError | None = None,
    ) -> SequenceFinished:
        assert sequence.slot_index is not None, "a running sequence has a slot"
        assert sequence.admitted_s is not None, "a running sequence was admitted"
        self._slots.leave(sequence.slot_index)
        self._waiting.record_service_time(now_s - sequence.admitted_s)
        return sequence.finish(reason, now_s, error)
