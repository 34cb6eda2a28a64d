"""The scheduler: waiting and running sequences, and the verbs that change them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from enum import StrEnum

from machd.engine.protocol.engine import MemoryReading
from machd.engine.protocol.step import (
    DraftOutcome,
    Lane,
    PrefillChunk,
    SampledToken,
    StepPlan,
    StepResult,
)
from machd.errors import (
    KvBudgetExceededError,
    MachdError,
    OverloadedError,
    RequestError,
    UnavailableError,
)
from machd.scheduler.coalesce import CoalescingIndex, is_shareable
from machd.scheduler.config import Arrangement
from machd.scheduler.decode import Decode
from machd.scheduler.draft_reading import DraftCounts, DraftReading
from machd.scheduler.events import (
    DecodeMode,
    DecodeModeChanged,
    Event,
    FinishReason,
    PromptReused,
    PromptScored,
    SequenceAdmitted,
    SequenceFinished,
    SequenceQueued,
    SequenceStarted,
    TokenGenerated,
)
from machd.scheduler.invariants import check_sequences
from machd.scheduler.plan import plan_step
from machd.scheduler.prefix_cache import PrefixCache
from machd.scheduler.prefix_limits import PrefixLimits
from machd.scheduler.prefix_reading import PrefixReading
from machd.scheduler.reservations import Reservations
from machd.scheduler.row_fault import error_of
from machd.scheduler.sequence import Sequence, SequenceRequest
from machd.scheduler.slots import Slots
from machd.scheduler.timeouts import overdue
from machd.scheduler.waiting import QueueLimits, WaitingQueue

_MODES = {Lane.BATCH: DecodeMode.BATCHED, Lane.SERIAL: DecodeMode.SINGLE}


class MemoryYield(StrEnum):
    """What the scheduler gave up for a step that lacked memory."""

    BLOCKS = "blocks"
    """Blocks of the prefix cache."""

    REQUEUED = "requeued"
    """A decode without a token, which waits again."""

    ENDED = "ended"
    """A decode, whose subscribers got OverloadedError."""


class Scheduler:
    """A queue of decodes, slots they run in, and sequences that read them.

    Changed only by its verbs; time comes in as ``now_s``. One step is ``admit``, ``plan``, the
    engine's ``run``, ``commit``. ``plan`` changes nothing, so a run that fails leaves the state it
    was planned from. Single flight is the narrowest configuration.
    """

    def __init__(self, arrangement: Arrangement, prefixes: PrefixCache | None = None) -> None:
        """Start idle.

        Args:
            arrangement: How to schedule.
            prefixes: What prompts can begin from; None where every one is computed whole.
        """
        self._prefixes = prefixes
        self._take_on(arrangement)
        self._step_mode = self.step_mode
        self._drafts = DraftCounts()
        self._waiting = WaitingQueue(arrangement.limits, slot_count=self.slot_count)
        self._index = CoalescingIndex(is_on=arrangement.shape.coalesce)
        self._open: dict[str, Decode] = {}
        self._next_number = 0
        self._is_held = False

    @property
    def mode(self) -> DecodeMode:
        """How sequences decode at the most."""
        return self._shape.mode

    @property
    def step_mode(self) -> DecodeMode:
        """How the next token is made; of an idle scheduler, how a lonely sequence's would be."""
        if self._shape.drafts.is_speculative(len(self._slots)):
            return DecodeMode.SPECULATIVE
        return self.mode

    @property
    def draft_reading(self) -> DraftReading:
        """What came of guesses since the start."""
        return replace(self._drafts.reading, batched_gain=self._pace.batched_gain)

    @property
    def slot_count(self) -> int:
        """Decodes that can run together."""
        return self._slots.count

    @property
    def running_count(self) -> int:
        """Sequences that are being answered, those that share a decode included."""
        return sum(len(decode.readers) for decode in self._slots)

    @property
    def waiting_count(self) -> int:
        """Sequences that wait for a slot, those that share a decode included."""
        return self._waiting.reader_count

    @property
    def active_loops(self) -> int:
        """Generation loops that are running: occupied slots."""
        return len(self._slots)

    @property
    def is_at_rest(self) -> bool:
        """Whether the engine has no row of a sequence, nor one that it has yet to free."""
        return not self._slots and not self._slots.released

    def is_arranged_as(self, arrangement: Arrangement) -> bool:
        """Whether :meth:`rearrange` would change nothing but the limits."""
        return self._shape == arrangement.shape and self._pace.is_configured_as(arrangement.pace)

    @property
    def kv_budget_bytes(self) -> int | None:
        """What running decodes may take of the KV cache together; None for no limit."""
        return self._reservations.budget_bytes

    @property
    def kv_reserved_bytes(self) -> int:
        """What they were promised of it."""
        return self._reservations.reserved_bytes

    @property
    def prefix_reading(self) -> PrefixReading | None:
        """What the prefix cache holds and has done; None without one."""
        return self._prefixes.reading if self._prefixes is not None else None

    def observe_memory(self, reading: MemoryReading) -> None:
        """Take in what the process has left: the prefix cache and admission make do with it."""
        if self._prefixes is not None:
            self._prefixes.observe_memory(reading.available_bytes)
        if reading.step_bytes is None:
            self._reservations.observe(None)
            return
        evictable_bytes = 0 if self._prefixes is None else self._prefixes.evictable_bytes
        self._reservations.observe(reading.kv_used_bytes + reading.step_bytes + evictable_bytes)

    def yield_memory(self, missing_bytes: int, now_s: float) -> tuple[MemoryYield, list[Event]]:
        """Give memory back for a step that lacks ``missing_bytes``.

        The next plan frees it. Each call gives something, so that calls come to an end.
        Blocks of the prefix cache go first. Where there are none, the youngest decode leaves its
        slot. Without a token and beside others it is queued again, else it ends with
        OverloadedError. One decode fewer runs from then on; each that finishes allows one more.
        """
        if self._prefixes is not None and self._prefixes.yield_bytes(missing_bytes):
            return MemoryYield.BLOCKS, []
        self._max_running = max(1, len(self._slots) - 1)
        youngest = max(self._slots, key=lambda one: (not one.completion_tokens, one.place))
        if len(self._slots) > 1 and not youngest.completion_tokens:
            self._leave_slot(youngest, is_sound=False)
            youngest.requeue()
            self._waiting.add(youngest)
            return MemoryYield.REQUEUED, []
        error = OverloadedError(
            "the server has too little memory left for this request; try again later",
            retry_after_s=self._waiting.retry_after_s(),
        )
        return MemoryYield.ENDED, [
            *self._end_decode(youngest, FinishReason.ERROR, now_s, error, is_sound=False)
        ]

    def set_prefix_cache(self, prefixes: PrefixCache | None) -> None:
        """Keep prompts and answers from now on, or no longer; at rest, the engine holds no block."""
        assert self.is_at_rest, "rows hold blocks"
        self._prefixes = prefixes

    def set_prefix_limits(self, limits: PrefixLimits) -> None:
        """Keep less of prompts and answers, or more."""
        if self._prefixes is not None:
            self._prefixes.set_limits(limits)

    def clear_prefixes(self, *, is_disk_included: bool) -> int:
        """Forget every block that no running sequence holds, in memory and perhaps on disk.

        Returns:
            How many.
        """
        if self._prefixes is None:
            return 0
        return self._prefixes.clear(is_disk_included=is_disk_included)

    def submit(self, requests: tuple[SequenceRequest, ...], now_s: float) -> list[Event]:
        """Queue all sequences of one request, or none: then each finishes with the error.

        One that joins a running decode is admitted here and now, and told what it has missed.
        """
        sequences = [Sequence(request) for request in requests]
        decodes = {
            sequence: self._decode_for(sequence, len(sequences), now_s) for sequence in sequences
        }
        new = tuple(decode for sequence, decode in decodes.items() if decode.readers[0] is sequence)
        try:
            self._check_room(new)
        except (RequestError, UnavailableError) as error:
            for decode in new:
                self._index.remove(decode)
            return [sequence.finish(FinishReason.ERROR, now_s, error) for sequence in sequences]
        for decode in new:
            self._waiting.add(decode)
        for sequence, decode in decodes.items():
            self._open[sequence.sequence_id] = decode
            if sequence is not decode.readers[0]:
                decode.join(sequence)
        # After all have joined: one that is answered at once has to find its siblings waiting.
        return [event for one in decodes.items() for event in self._taken_in(*one, now_s)]

    def abort(
        self, sequence_ids: tuple[str, ...], error: MachdError | None, now_s: float
    ) -> list[Event]:
        """End sequences wherever they are. Ids that are unknown or finished are no fault."""
        events: list[Event] = []
        for sequence_id in sequence_ids:
            decode = self._open.get(sequence_id)
            if decode is not None:
                sequence = next(one for one in decode.readers if one.sequence_id == sequence_id)
                events.append(self._end(sequence, FinishReason.ABORT, now_s, error))
        return events

    def admit(self, now_s: float) -> list[Event]:
        """Turn away who waited or ran too long, then give free slots to who waits, in order."""
        events: list[Event] = list(self._expire(now_s))
        if self._is_held or now_s < self._window_end_s():
            return events
        while self._waiting and self._slots.free_count and len(self._slots) < self._max_running:
            decode = self._waiting.first
            lane = self._reservations.lane_for(decode)
            if lane is None:
                break  # nobody overtakes: who is behind would take what the first one waits for
            self._waiting.remove(decode)
            slot_index = self._slots.occupy(decode, lane, now_s)
            self._reservations.reserve(slot_index, lane, decode.reserved_tokens)
            if self._prefixes is not None:
                self._prefixes.enter(decode)
            events += [self._admitted(reader, decode, now_s) for reader in decode.readers]
        return events

    def wait_s(self, now_s: float) -> float | None:
        """Seconds until ``admit`` has something to do, asked when ``plan`` is empty.

        0 or more while sequences wait although no step can run (for company, for their timeout, or
        because admission is held); None when there is nothing to wait for, or a step can run.
        """
        if self._slots or self._slots.released or not self._waiting:
            return None
        due_s = self._waiting.next_expiry_s()
        if not self._is_held:
            due_s = min(due_s, self._window_end_s())
        return max(0.0, due_s - now_s)

    def plan(self) -> StepPlan:
        """What the pace allows of the prompts, and the next token of one lane's rows."""
        drafts = self._shape.drafts
        return plan_step(self._slots, self._pace, self._prefixes, drafts, turn=self._turn)

    def commit(
        self, plan: StepPlan, result: StepResult, now_s: float, *, duration_s: float
    ) -> list[Event]:
        """Take in what the engine made of ``plan``, and how long its ``run`` took."""
        self._slots.confirm_released(plan.release)
        self._observe(plan, result, duration_s)
        whole = self._take_prompts(plan, result)
        if self._prefixes is not None:
            self._prefixes.commit(plan, result)
        self._drafts.observe(result)
        events: list[Event] = [one for chunk in plan.prefill for one in self._reused(chunk)]
        events += [one for decode in whole for one in self._scored(decode)]
        events += self._changed_mode()
        for slot_index, tokens in Counter(one.slot_index for one in result.tokens).items():
            self._running(slot_index).settle(tokens)
        for token in result.tokens:
            # Of a row that ended with an earlier token of the step, the others are not wanted.
            if token.slot_index not in self._slots.released:
                events.extend(self._take(token, now_s))
        for fault in result.faults:
            error = error_of(fault)
            decode = self._running(fault.slot_index)
            events += self._end_decode(decode, FinishReason.ERROR, now_s, error, is_sound=False)
        without_completion = [decode for decode in whole if not decode.has_completion]
        for decode in without_completion:
            events += self._end_decode(decode, FinishReason.LENGTH, now_s)
        return events

    def fail(
        self, error: MachdError, now_s: float, *, include_waiting: bool = False
    ) -> list[Event]:
        """End every running sequence with ``error``; who waits goes on waiting unless included."""
        if isinstance(error, OverloadedError):
            self._max_running = max(1, len(self._slots) // 2)  # a smaller batch may fit
        everybody = [*self._slots, *(self._waiting if include_waiting else ())]
        events = self._end_with(error, everybody, now_s, is_sound=False)
        self._slots.confirm_released(self._slots.released)
        if self._prefixes is not None:
            self._prefixes.fail()
        return events

    def end_all(self, error: MachdError, now_s: float) -> list[Event]:
        """End every sequence with ``error``, on an engine that works.

        The plans that follow free the slots and see to what is kept of the rows; then they are
        empty.
        """
        return self._end_with(error, [*self._slots, *self._waiting], now_s, is_sound=True)

    def hold_admission(self) -> None:
        """From now on nobody is given a slot, so that what runs comes to an end.

        All else goes on: sequences are queued, aborted, turned away when they have waited too long,
        and may still join a decode that runs.
        """
        self._is_held = True

    def resume_admission(self) -> None:
        """Give slots to who waits again."""
        self._is_held = False

    def set_limits(self, limits: QueueLimits) -> None:
        """Hold whoever comes, waits or runs against other limits.

        Who waits is not turned away because there is less room now.
        """
        self._limits = limits
        self._waiting.set_bounds(limits, slot_count=self.slot_count)

    def rearrange(self, arrangement: Arrangement, now_s: float) -> list[Event]:
        """Schedule in another way, at rest, and go on giving slots to who waits.

        They stand where they stood. Only one that the new KV budget can never hold is ended, with
        KvBudgetExceededError.
        """
        assert self.is_at_rest, "rows that run keep the arrangement that they were admitted under"
        self._take_on(arrangement)
        self.set_limits(arrangement.limits)
        self._index.switch(is_on=arrangement.shape.coalesce)
        self.resume_admission()
        return [event for one in tuple(self._waiting) for event in self._end_unfit(one, now_s)]

    def check_invariants(self, *, is_whole: bool = True) -> None:
        """Assert that slots, queue, sequences and what was promised agree.

        Args:
            is_whole: Whether to look at all that the prefix cache keeps, too, and not only at what
                running sequences hold of it. That takes long where it keeps much: at idle moments.

        Raises:
            AssertionError: They do not; its text says which.
        """
        check_sequences(self._slots, self._waiting, self._open)
        self._reservations.check_invariants(self._slots)
        self._index.check_invariants([*self._slots, *self._waiting])
        if self._prefixes is not None:
            self._prefixes.check_invariants(self._slots, is_whole=is_whole)

    def _take_on(self, arrangement: Arrangement) -> None:
        """Begin with empty slots."""
        self._limits = arrangement.limits
        self._shape = arrangement.shape
        self._pace = arrangement.pace
        self._slots = Slots(self._shape.slot_count)
        self._max_running = self._slots.count
        self._reservations = Reservations(self._shape.kv, max_rows=self.slot_count)
        self._turn = Lane.BATCH

    def _end_unfit(self, decode: Decode, now_s: float) -> list[SequenceFinished]:
        """End a decode that could never run: it would come to stand before all others for good."""
        try:
            self._reservations.check((decode,), (), self._waiting.retry_after_s())
        except KvBudgetExceededError as error:
            return self._end_decode(decode, FinishReason.ERROR, now_s, error)
        return []

    def _decode_for(self, sequence: Sequence, siblings: int, now_s: float) -> Decode:
        """One that computes the same already, or a new one."""
        decode = self._index.find(sequence.request, readers=siblings)
        return decode if decode is not None else self._new_decode(sequence, now_s)

    def _new_decode(self, leader: Sequence, now_s: float) -> Decode:
        number, self._next_number = self._next_number, self._next_number + 1
        decode = Decode(
            leader,
            number=number,
            submitted_s=now_s,
            keeps_tokens=self._shape.coalesce and is_shareable(leader.request),
        )
        self._index.add(decode)
        return decode

    def _check_room(self, new: tuple[Decode, ...]) -> None:
        self._reservations.check(new, self._waiting, self._waiting.retry_after_s())
        self._waiting.check_room(new, free_slots=self._slots.free_count)

    def _taken_in(self, sequence: Sequence, decode: Decode, now_s: float) -> list[Event]:
        """Tell a sequence that it waits, or that it reads along and what it has missed."""
        if not decode.is_running:
            return [SequenceQueued(sequence.sequence_id, self._waiting.position(decode))]
        reused = decode.reused_tokens
        known = [PromptReused(sequence.sequence_id, reused)] if reused else []
        missed = [TokenGenerated(sequence.sequence_id, token, now_s) for token in decode.tokens]
        started = [self._started(sequence, decode, now_s)] if decode.completion_tokens else []
        return [self._admitted(sequence, decode, now_s), *known, *started, *missed]

    def _admitted(self, reader: Sequence, decode: Decode, now_s: float) -> SequenceAdmitted:
        assert decode.slot_index is not None, "it has a slot"
        assert decode.lane is not None, "it has a lane"
        leader, request = decode.readers[0].request, reader.request
        self._waiting.start_group(request.group_id)
        return SequenceAdmitted(
            reader.sequence_id,
            decode.slot_index,
            self._mode_of(decode, self.step_mode),
            self.active_loops,
            now_s,
            coalesced_with=leader.request_id if leader.group_id != request.group_id else None,
            request_id=request.request_id,
            prompt_tokens=len(request.prompt),
            max_tokens=request.max_tokens,
            active_limit=self._max_running,
            fanout=len(decode.readers),
        )

    def _started(self, reader: Sequence, decode: Decode, now_s: float) -> SequenceStarted:
        # Of the last step, whoever has ended with it.
        return SequenceStarted(reader.sequence_id, self._mode_of(decode, self._step_mode), now_s)

    def _mode_of(self, decode: Decode, step_mode: DecodeMode) -> DecodeMode:
        """How a running decode's tokens are made by a step."""
        assert decode.lane is not None, "it has a lane"
        is_speculative = step_mode is DecodeMode.SPECULATIVE
        return step_mode if is_speculative else _MODES[decode.lane]

    def _changed_mode(self) -> list[DecodeModeChanged]:
        previous, self._step_mode = self._step_mode, self.step_mode
        is_same = previous is self._step_mode
        return [] if is_same else [DecodeModeChanged(previous, self._step_mode)]

    def _reused(self, chunk: PrefillChunk) -> list[PromptReused]:
        """Tell a row's readers what of their prompt need not be computed, as it begins."""
        if chunk.reused is None:
            return []
        decode = self._running(chunk.slot_index)
        return [PromptReused(reader.sequence_id, decode.reused_tokens) for reader in decode.readers]

    def _take_prompts(self, plan: StepPlan, result: StepResult) -> list[Decode]:
        """Count the prompt tokens of a step, and keep their log-probabilities.

        Returns:
            Those whose prompt is whole now and did not fail.
        """
        decodes = [self._running(chunk.slot_index) for chunk in plan.prefill]
        for decode, chunk in zip(decodes, plan.prefill, strict=True):
            decode.is_opened = True
            decode.prefilled_tokens += len(chunk.token_ids)
        for logprob in result.prompt_logprobs:
            self._running(logprob.slot_index).add_prompt_logprob(logprob)
        faulty = {fault.slot_index for fault in result.faults}
        return [one for one in decodes if one.is_prefilled and one.slot_index not in faulty]

    def _scored(self, decode: Decode) -> list[PromptScored]:
        """Tell a row's readers the log-probabilities of their prompt, if they asked."""
        if not decode.asks_prompt_logprobs:
            return []
        logprobs, decode.prompt_logprobs = tuple(decode.prompt_logprobs), []
        return [PromptScored(reader.sequence_id, logprobs) for reader in decode.readers]

    def _observe(self, plan: StepPlan, result: StepResult, duration_s: float) -> None:
        lane = self._running(plan.decode[0].slot_index).lane if plan.decode else None
        # A prompt's last token is computed by the step that decodes it.
        prefill_tokens = plan.prefill_tokens - sum(chunk.is_last for chunk in plan.prefill)
        self._pace.observe(
            lane,
            len(plan.decode),
            duration_s=duration_s,
            prefill_tokens=prefill_tokens,
            context_tokens=max((chunk.start for chunk in plan.prefill), default=0),
            ahead_tokens=max(0, result.span_tokens - 1),
            accepted_tokens=len(result.tokens) - len({one.slot_index for one in result.tokens}),
        )
        outcomes = {one.slot_index: one for one in result.drafts}
        for row in plan.decode:
            drafts = outcomes.get(row.slot_index, DraftOutcome(row.slot_index, 0, 0))
            acceptance = self._running(row.slot_index).acceptance
            acceptance.observe(drafts.drafted_tokens, drafts.accepted_tokens)
        if lane is not None:
            self._turn = Lane.SERIAL if lane is Lane.BATCH else Lane.BATCH

    def _take(self, token: SampledToken, now_s: float) -> list[Event]:
        decode = self._running(token.slot_index)
        is_stop = token.token_id in decode.request.stop_token_ids
        decode.count_token(token)
        if decode.is_far_ahead:
            self._index.remove(decode)
        events: list[Event] = []
        if decode.completion_tokens == 1:
            events += [self._started(reader, decode, now_s) for reader in decode.readers]
        if is_stop:
            ended = self._end_decode(decode, FinishReason.STOP, now_s, stop_token=token)
            return [*events, *ended]
        events += [TokenGenerated(reader.sequence_id, token, now_s) for reader in decode.readers]
        if decode.completion_tokens == decode.request.max_tokens:
            events += self._end_decode(decode, FinishReason.LENGTH, now_s)
        return events

    def _running(self, slot_index: int) -> Decode:
        decode = self._slots.at(slot_index)
        assert decode is not None, "chunks, tokens and faults belong to a running row"
        return decode

    def _window_end_s(self) -> float:
        """When an idle scheduler stops waiting for company."""
        if self._slots or not 0 < len(self._waiting) < self.slot_count:
            return -math.inf
        return self._waiting.oldest_s + self._shape.window_s

    def _expire(self, now_s: float) -> list[SequenceFinished]:
        late = overdue(self._limits, self._waiting, self._slots, now_s)
        return [self._end(one, FinishReason.ERROR, now_s, error) for one, error in late]

    def _end_with(
        self, error: MachdError, decodes: Iterable[Decode], now_s: float, *, is_sound: bool
    ) -> list[Event]:
        events: list[Event] = []
        for decode in decodes:
            events += self._end_decode(decode, FinishReason.ERROR, now_s, error, is_sound=is_sound)
        return events

    def _end_decode(
        self,
        decode: Decode,
        reason: FinishReason,
        now_s: float,
        error: MachdError | None = None,
        *,
        is_sound: bool = True,
        stop_token: SampledToken | None = None,
    ) -> list[SequenceFinished]:
        return [
            self._end(reader, reason, now_s, error, is_sound=is_sound, stop_token=stop_token)
            for reader in tuple(decode.readers)
        ]

    def _end(
        self,
        sequence: Sequence,
        reason: FinishReason,
        now_s: float,
        error: MachdError | None = None,
        *,
        is_sound: bool = True,
        stop_token: SampledToken | None = None,
    ) -> SequenceFinished:
        """End one sequence; the decode goes on as long as somebody reads it."""
        decode = self._open.pop(sequence.sequence_id)
        decode.readers.remove(sequence)
        if not decode.readers:
            self._retire(decode, now_s, is_sound=is_sound)
        return sequence.finish(
            reason, now_s, error, cached_tokens=decode.reused_tokens, stop_token=stop_token
        )

    def _retire(self, decode: Decode, now_s: float, *, is_sound: bool) -> None:
        """Give back what a decode that nobody reads any more holds.

        Args:
            decode: It.
            now_s: When.
            is_sound: Whether what it has computed may serve others.
        """
        self._index.remove(decode)
        if decode.slot_index is None:
            self._waiting.remove(decode)
            return
        assert decode.admitted_s is not None, "a running decode was admitted"
        self._leave_slot(decode, is_sound=is_sound)
        self._waiting.record_service_time(now_s - decode.admitted_s)
        if is_sound:
            self._max_running = min(self._max_running + 1, self._slots.count)

    def _leave_slot(self, decode: Decode, *, is_sound: bool) -> None:
        assert decode.slot_index is not None, "a running decode has a slot"
        if self._prefixes is not None:
            self._prefixes.leave(decode, keeps=is_sound)
        self._slots.leave(decode.slot_index)
        self._reservations.release(decode.slot_index)
