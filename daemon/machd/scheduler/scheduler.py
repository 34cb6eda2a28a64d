"""The scheduler of waiting and running sequences."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

from machd.engine.protocol.adapters import AdapterRoom, NoAdapterRoom
from machd.engine.protocol.memory import MemoryReading
from machd.engine.protocol.step import Lane, RowOutput, SampledToken, StepPlan, StepResult
from machd.errors import (
    KvBudgetExceededError,
    MachdError,
    OverloadedError,
    RequestError,
    UnavailableError,
)
from machd.scheduler.adapter_loading import AdapterLoading
from machd.scheduler.admission_round import AdmissionRound
from machd.scheduler.coalesce import CoalescingIndex
from machd.scheduler.config import SchedulerConfig
from machd.scheduler.departures import Departures
from machd.scheduler.draft_reading import DraftCounts, DraftReading
from machd.scheduler.events import (
    DecodeMode,
    DecodeModeChanged,
    Event,
    FinishReason,
    OutputGenerated,
    SequenceAdmitted,
    SequenceQueued,
    SequenceStarted,
)
from machd.scheduler.open_sequences import OpenSequences
from machd.scheduler.plan import Planner
from machd.scheduler.prefix_cache import PrefixCache
from machd.scheduler.prefix_limits import PrefixLimits, PrefixReading
from machd.scheduler.running import RunningSequences, error_of
from machd.scheduler.sequence import Sequence
from machd.scheduler.subscriber import SequenceRequest, Subscriber
from machd.scheduler.suspensions import MemoryYield, Suspensions
from machd.scheduler.waiting import QueueLimits, WaitingQueue
from machd.scheduler.waits import WaitReason, Waits

_ADAPTER_POLL_S = 0.005
"""Time between two looks for adapters that sequences wait for while nothing runs."""

_MODES = {Lane.BATCH: DecodeMode.BATCHED, Lane.SERIAL: DecodeMode.SINGLE}


class Scheduler:
    """A queue of sequences, the slots in which they run, and their subscribers.

    One step is ``admit``, ``plan``, the engine's ``run``, ``commit``. ``plan`` changes nothing, so a
    failed run leaves the state it was planned from. Time comes in as ``now_s``.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        prefixes: PrefixCache | None = None,
        adapters: AdapterRoom | None = None,
    ) -> None:
        """Start idle.

        Args:
            config: Slots, budget, pace and limits.
            prefixes: Prefix cache; None to compute every prompt whole.
            adapters: The engine's; None for an engine without.
        """
        self._adapters = adapters or NoAdapterRoom()
        self._departures = Departures()
        self._forecast_s: dict[int, float] = {}
        self._open = OpenSequences(
            WaitingQueue(config.limits, self.departure_s),
            self._take_on(config, prefixes),
            CoalescingIndex(is_on=config.coalesce),
            self._departures,
        )
        self._suspensions = Suspensions(self._open, self._adapters)
        self._step_mode = self.step_mode
        self._drafts = DraftCounts()
        self._is_held = False
        self._awaits_adapters = False
        self._adapter_loading = AdapterLoading(self._adapters)
        self._waits = Waits()

    @property
    def mode(self) -> DecodeMode:
        """Decode mode of the config, without drafts."""
        return self._config.mode

    @property
    def step_mode(self) -> DecodeMode:
        """Decode mode of the next step; when idle, the mode of a single sequence."""
        if self._config.drafts.is_speculative(len(self._running)):
            return DecodeMode.SPECULATIVE
        return self.mode

    @property
    def draft_reading(self) -> DraftReading:
        """Counts of draft tokens since the start."""
        return replace(self._drafts.reading, batched_gain=self._planner.pace.drafts.batched_gain)

    @property
    def slot_count(self) -> int:
        """Sequences that can run together."""
        return self._running.slots.count

    @property
    def running_count(self) -> int:
        """Subscribers of running sequences."""
        return sum(len(sequence.subscribers) for sequence in self._running)

    @property
    def prefilled_tokens(self) -> dict[str, int]:
        """Prompt tokens computed or reused so far, by the id of each subscriber of a running sequence."""
        return {
            subscriber.sequence_id: min(sequence.prefilled_tokens, sequence.prompt_tokens)
            for sequence in self._running
            for subscriber in sequence.subscribers
        }

    @property
    def waiting_count(self) -> int:
        """Subscribers of waiting sequences."""
        return self._waiting.subscriber_count

    @property
    def waits(self) -> Waits:
        """Why sequences wait, as the last :meth:`admit` found it."""
        return self._waits

    @property
    def active_loops(self) -> int:
        """Running sequences, each counted once."""
        return len(self._running)

    @property
    def is_at_rest(self) -> bool:
        """True while the engine has no row, running or still to free."""
        return self._running.is_at_rest

    def is_configured_as(self, config: SchedulerConfig) -> bool:
        """Return True if :meth:`apply_config` would change nothing but the limits."""
        return self._config.differs_only_in_limits(config)

    @property
    def kv_budget_bytes(self) -> int | None:
        """KV budget in bytes; None for no limit."""
        return self._running.reservations.budget_bytes

    @property
    def kv_reserved_bytes(self) -> int:
        """Reserved bytes of the KV budget."""
        return self._running.reservations.reserved_bytes

    @property
    def prefix_reading(self) -> PrefixReading | None:
        """Counts of the prefix cache; None without one."""
        return self._running.prefixes.reading if self._running.prefixes is not None else None

    def observe_memory(self, reading: MemoryReading) -> None:
        """Limit the prefix cache and admission to the memory that is left."""
        self._running.observe_memory(reading)

    def yield_memory(self, missing_bytes: int, now_s: float) -> tuple[MemoryYield, list[Event]]:
        """Give up memory for a step that lacks ``missing_bytes``: :meth:`Suspensions.yield_memory`."""
        return self._suspensions.yield_memory(missing_bytes, now_s)

    def yield_unused(self, missing_bytes: int) -> MemoryYield | None:
        """Give up what no row uses: :meth:`Suspensions.yield_unused`."""
        return self._suspensions.yield_unused(missing_bytes)

    def suspend(self, config: SchedulerConfig | None = None) -> None:
        """Suspend running sequences for another config: :meth:`Suspensions.suspend`."""
        self._suspensions.suspend(config)

    def suspend_half(self) -> bool:
        """Suspend every running sequence, and let half as many run: :meth:`Suspensions.suspend_half`."""
        return self._suspensions.suspend_half()

    def survive(self, error: MachdError, now_s: float) -> list[Event]:
        """Suspend every running sequence after a failed step: :meth:`Suspensions.survive`."""
        return self._suspensions.survive(error, now_s)

    def set_prefix_cache(self, prefixes: PrefixCache | None) -> None:
        """Replace the prefix cache, or remove it with None; at rest, with no block in the engine."""
        assert self.is_at_rest, "rows hold blocks"
        self._running.prefixes = prefixes

    def set_prefix_limits(self, limits: PrefixLimits) -> None:
        """Change the limits of the prefix cache, if there is one."""
        if self._running.prefixes is not None:
            self._running.prefixes.set_limits(limits)

    def clear_prefixes(self, *, is_disk_included: bool) -> int:
        """Drop every block that no running sequence holds, in memory and on request on disk.

        Returns:
            Number of blocks dropped.
        """
        if self._running.prefixes is None:
            return 0
        return self._running.prefixes.clear(is_disk_included=is_disk_included)

    def submit(self, requests: tuple[SequenceRequest, ...], now_s: float) -> list[Event]:
        """Queue all completions of one request, or none: then each finishes with the error.

        A subscriber that joins a running sequence is admitted at once, and its missed tokens replayed. A request
        with a resumption is not held against the bounds of the queue, which it was in already.
        """
        subscribers = [Subscriber(request) for request in requests]
        sequences = {
            subscriber: self._open.sequence_for(subscriber, len(subscribers), now_s)
            for subscriber in subscribers
        }
        new = tuple(
            sequence
            for subscriber, sequence in sequences.items()
            if sequence.subscribers[0] is subscriber
        )
        try:
            self._check_room(new)
        except (RequestError, UnavailableError) as error:
            for sequence in new:
                self._index.remove(sequence)
            return [
                subscriber.finish(FinishReason.ERROR, now_s, error) for subscriber in subscribers
            ]
        for sequence in new:
            self._waiting.add(sequence)
        for subscriber, sequence in sequences.items():
            self._open.add(subscriber, sequence)
            if subscriber is not sequence.subscribers[0]:
                sequence.join(subscriber)
        # After all have joined: a subscriber admitted at once has to find its siblings waiting.
        return [event for one in sequences.items() for event in self._taken_in(*one, now_s)]

    def abort(
        self, sequence_ids: tuple[str, ...], error: MachdError | None, now_s: float
    ) -> list[Event]:
        """End waiting or running subscribers; unknown and finished ids are ignored."""
        return self._open.abort(sequence_ids, error, now_s)

    def admit(self, now_s: float) -> list[Event]:
        """Expire timed-out subscribers, then admit waiting sequences in queue order.

        A sequence whose adapters are not in memory yet lets others pass.
        """
        self._forecast_s.clear()
        events = self._open.expire(now_s)
        self._adapter_loading.go_on(is_at_rest=self.is_at_rest)
        if self._is_held or now_s < self._window_end_s():
            self._waits = Waits.of_sequences(WaitReason.TURN, {}, self._waiting.suspended)
            return events
        unfit: Sequence | None = None
        admission = AdmissionRound(self._waiting, self._running)
        while not self._running.is_full and (candidate := admission.next_candidate()) is not None:
            sequence = candidate.sequence
            if candidate.refusal is not None:
                events += self._open.fail(candidate.refusal, [sequence], now_s, is_sound=True)
                continue
            if not self._running.admit(sequence, now_s):
                unfit = sequence
                break  # a later sequence would take the budget that the first one waits for
            self._waiting.remove(sequence)
            for subscriber in sequence.subscribers:
                if sequence.resumed_tokens:
                    events.append(sequence.resumed_event(subscriber, now_s))
                else:
                    events.append(self._admitted(subscriber, sequence, now_s))
        self._awaits_adapters = bool(admission.passed)
        own = dict.fromkeys(admission.passed, WaitReason.ADAPTER)
        if unfit is not None:
            own[unfit] = WaitReason.MEMORY
        self._waits = Waits.of_sequences(self._running.full_for, own, self._waiting.suspended)
        return events

    def departure_s(self, count: int) -> float:
        """Forecast the seconds until so many sequences have left their slots, once for each state of the running ones."""
        if count not in self._forecast_s:
            self._forecast_s[count] = self._departures.seconds_until(
                count, self._running, self._waiting, self._planner.pace
            )
        return self._forecast_s[count]

    def wait_s(self, now_s: float) -> float | None:
        """Seconds until ``admit`` has something to do, asked when ``plan`` is empty.

        None if nothing waits, or a step can run.
        """
        if not self.is_at_rest or not self._waiting:
            return None
        due_s = self._waiting.next_expiry_s()
        if self._adapter_loading.has_more:
            due_s = now_s
        elif self._awaits_adapters:
            due_s = min(due_s, now_s + _ADAPTER_POLL_S)
        elif not self._is_held:
            due_s = min(due_s, self._window_end_s())
        return max(0.0, due_s - now_s)

    def plan(self) -> StepPlan:
        """Plan the next step; empty if there is nothing to compute or free."""
        return self._planner.plan(self._running)

    def commit(
        self, plan: StepPlan, result: StepResult, now_s: float, *, duration_s: float
    ) -> list[Event]:
        """Apply the result of ``plan`` and the duration of its ``run``."""
        running = self._running
        self._departures.observe(plan, result, running, now_s=now_s, duration_s=duration_s)
        self._forecast_s.clear()
        self._adapter_loading.observe_step(duration_s)
        running.slots.confirm_released(plan.release)
        self._planner.observe(plan, result, running, duration_s)
        whole = running.take_prompts(plan, result)
        self._drafts.observe(result)
        opening = [one for one in plan.prefill if one.opens and not one.resumed_tokens]
        opened = [running.at(one.slot_index) for one in opening]
        events: list[Event] = [event for one in opened for event in one.look_up_events()]
        events += self._changed_mode()
        for slot_index, tokens in Counter([one.slot_index for one in result.tokens]).items():
            running.at(slot_index).settle(tokens)
        for output in result.outputs:
            # An earlier token of the step may have ended the row.
            if (sequence := running.slots.at(output.slot_index)) is not None:
                events += self._take(sequence, output, now_s)
        for fault in result.faults:
            failed = [running.at(fault.slot_index)]
            events += self._open.fail(error_of(fault), failed, now_s, is_sound=False)
        for sequence in [one for one in whole if not one.has_completion]:
            events += self._open.end(sequence, FinishReason.LENGTH, now_s)
        self._suspensions.clear_suspects(result)
        return events

    def fail(
        self, error: MachdError, now_s: float, *, include_waiting: bool = False
    ) -> list[Event]:
        """End every running sequence with ``error``, and every waiting one if included."""
        if isinstance(error, OverloadedError):
            self._running.limit_to(len(self._running) // 2)  # a smaller batch may fit
        sequences = [*self._running, *(self._waiting if include_waiting else ())]
        events = self._open.fail(error, sequences, now_s, is_sound=False)
        self._running.forget_rows()
        return events

    def end_all(self, error: MachdError, now_s: float) -> list[Event]:
        """End every sequence with ``error``, on an engine that works.

        The next plans free the slots and store blocks, until they are empty.
        """
        return self._open.fail(error, [*self._running, *self._waiting], now_s, is_sound=True)

    def hold_admission(self) -> None:
        """Admit no sequence until :meth:`resume_admission`, so that the engine comes to rest.

        Queueing, aborts, timeouts and joining a running sequence go on.
        """
        self._is_held = True

    def resume_admission(self) -> None:
        """End :meth:`hold_admission`."""
        self._is_held = False

    def set_limits(self, limits: QueueLimits) -> None:
        """Apply other queue limits and timeouts; waiting sequences stay beyond a smaller bound."""
        self._waiting.set_limits(limits)

    def apply_config(self, config: SchedulerConfig, now_s: float) -> list[Event]:
        """Apply a new config, at rest; waiting sequences stay queued and are admitted under it.

        A sequence that can never fit the new KV budget ends with KvBudgetExceededError.
        """
        assert self.is_at_rest, "rows that run keep the config that they were admitted under"
        self._open.running = self._take_on(config, self._running.prefixes)
        self.set_limits(config.limits)
        self._index.switch(is_on=config.coalesce)
        self.resume_admission()
        return [event for one in tuple(self._waiting) for event in self._end_unfit(one, now_s)]

    def check_invariants(self, *, is_whole: bool = True) -> None:
        """Assert that slots, queue, sequences, reservations and prefix cache agree.

        Args:
            is_whole: Check all blocks of the prefix cache, and not only those of running sequences.
                That takes long with many blocks: for idle moments.

        Raises:
            AssertionError: They do not; its text says which.
        """
        self._open.check_invariants(is_whole=is_whole)

    @property
    def _running(self) -> RunningSequences:
        return self._open.running

    @property
    def _waiting(self) -> WaitingQueue:
        return self._open.waiting

    @property
    def _index(self) -> CoalescingIndex:
        return self._open.index

    def _take_on(self, config: SchedulerConfig, prefixes: PrefixCache | None) -> RunningSequences:
        """Set the config and its pace; return its slots and budget, all free."""
        self._config = config
        self._planner = Planner(config)
        return RunningSequences(config, prefixes, self._adapters)

    def _end_unfit(self, sequence: Sequence, now_s: float) -> list[Event]:
        """End a sequence that can never run: at the head of the queue it would block all others."""
        try:
            self._running.reservations.check_alone(sequence)
        except KvBudgetExceededError as error:
            return self._open.fail(error, [sequence], now_s, is_sound=True)
        return []

    def _check_room(self, sequences: tuple[Sequence, ...]) -> None:
        for sequence in sequences:
            if sequence.request.resumption is not None:
                self._running.reservations.check_alone(sequence)
        new = tuple(one for one in sequences if one.request.resumption is None)
        self._running.reservations.check(new, self._waiting, self._waiting.retry_after_s)
        self._waiting.check_room(new, free_slots=self._running.slots.free_count)

    def _taken_in(self, subscriber: Subscriber, sequence: Sequence, now_s: float) -> list[Event]:
        """Events for a new subscriber: queued, or admitted with a replay of what it missed."""
        if not sequence.is_running:
            queued = SequenceQueued(subscriber.sequence_id, self._waiting.position(sequence))
            # A completion may be whole, though its engine process died before its end was read.
            reason = sequence.end_reason
            ended = [] if reason is None else self._open.end(sequence, reason, now_s)
            return [queued, *ended]
        known = sequence.look_up_events(subscriber)
        missed = [OutputGenerated(subscriber.sequence_id, one, now_s) for one in sequence.tokens]
        started = [self._started(subscriber, sequence, now_s)] if sequence.completion_tokens else []
        return [self._admitted(subscriber, sequence, now_s), *known, *started, *missed]

    def _admitted(
        self, subscriber: Subscriber, sequence: Sequence, now_s: float
    ) -> SequenceAdmitted:
        self._waiting.start_group(subscriber.request.group_id)
        return sequence.admitted_event(
            subscriber,
            self._mode_of(sequence, self.step_mode),
            now_s,
            active_loops=self.active_loops,
            active_limit=self._running.max_count,
        )

    def _started(self, subscriber: Subscriber, sequence: Sequence, now_s: float) -> SequenceStarted:
        # The mode of the last step, even if rows that decided it ended with it.
        return SequenceStarted(
            subscriber.sequence_id, self._mode_of(sequence, self._step_mode), now_s
        )

    def _mode_of(self, sequence: Sequence, step_mode: DecodeMode) -> DecodeMode:
        """Decode mode of a running sequence in a step."""
        assert sequence.lane is not None, "it has a lane"
        is_speculative = step_mode is DecodeMode.SPECULATIVE
        return step_mode if is_speculative else _MODES[sequence.lane]

    def _changed_mode(self) -> list[DecodeModeChanged]:
        previous, self._step_mode = self._step_mode, self.step_mode
        is_same = previous is self._step_mode
        return [] if is_same else [DecodeModeChanged(previous, self._step_mode)]

    def _take(self, sequence: Sequence, output: RowOutput, now_s: float) -> list[Event]:
        events: list[Event] = []
        end_reason = None
        if isinstance(output, SampledToken):
            sequence.count_token(output)
            if sequence.is_closed_to_subscribers:
                self._index.remove(sequence)
            if sequence.completion_tokens == 1:
                events += [self._started(one, sequence, now_s) for one in sequence.subscribers]
            end_reason = sequence.end_reason
            if end_reason is FinishReason.STOP:
                ends = self._open.end(sequence, end_reason, now_s, stop_token=output)
                return [*events, *ends]
        events += [
            OutputGenerated(subscriber.sequence_id, output, now_s)
            for subscriber in sequence.subscribers
        ]
        if end_reason is not None:
            events += self._open.end(sequence, end_reason, now_s)
        return events

    def _window_end_s(self) -> float:
        """Time until which an idle scheduler waits for more requests."""
        if self._running or not 0 < len(self._waiting) < self.slot_count:
            return -math.inf
        return self._waiting.oldest_s + self._config.window_s
