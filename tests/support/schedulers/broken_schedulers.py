"""Schedulers and an engine that are broken on purpose, each in one way, so that a machine of histories can notice."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from msgspec import structs

from machd.engine.protocol.step import (
    Lane,
    PrefillChunk,
    RowFault,
    RowOutput,
    SampledToken,
    StepPlan,
    StepResult,
)
from machd.errors import (
    MachdError,
    QueueFullError,
)
from machd.scheduler.coalesce import CoalescingIndex, key_of
from machd.scheduler.config import (
    SchedulerConfig,
)
from machd.scheduler.draft_reading import DraftReading
from machd.scheduler.events import (
    DecodeModeChanged,
    Event,
    FinishReason,
    OutputGenerated,
    SequenceFinished,
    SequenceStarted,
    SuspendReason,
)
from machd.scheduler.open_sequences import OpenSequences
from machd.scheduler.prefix_cache import PrefixCache
from machd.scheduler.reservations import Reservations
from machd.scheduler.running import RunningSequences
from machd.scheduler.scheduler import Scheduler
from machd.scheduler.sequence import Sequence
from machd.scheduler.slots import Slots
from machd.scheduler.subscriber import SequenceRequest, Subscriber
from machd.scheduler.waiting import WaitingQueue
from support.engines.fake_engine import FakeEngine
from support.schedulers.continuous_machine import STOP_TOKENS


class _NeverGivesBack(Reservations):
    def release(self, slot_index: int) -> None:
        del slot_index


class ForgetsToGiveBack(Scheduler):
    """Never releases a reservation."""

    def __init__(self, config: SchedulerConfig) -> None:
        """Start idle."""
        super().__init__(config)
        self._running.reservations = _NeverGivesBack(config.kv, max_rows=config.slot_count)


class _IgnoresPadding(Reservations):
    def lane_for(self, sequence: Sequence) -> Lane | None:
        lane = super().lane_for(sequence)
        return Lane.BATCH if lane is Lane.SERIAL else lane


class ForgetsThePadding(Scheduler):
    """Admits to the batch without counting its padding."""

    def __init__(self, config: SchedulerConfig) -> None:
        """Start idle."""
        super().__init__(config)
        self._running.reservations = _IgnoresPadding(config.kv, max_rows=config.slot_count)


class _TurnedAround(WaitingQueue):
    def first_but(self, passed: Collection[Sequence]) -> Sequence | None:
        others = [one for one in self if one not in passed]
        return others[-1] if others else None


class LastComeFirstServed(Scheduler):
    """Admits the newest sequence first."""

    def __init__(self, config: SchedulerConfig) -> None:
        """Start idle."""
        super().__init__(config)
        self._open.waiting = _TurnedAround(config.limits)


class _Careless(CoalescingIndex):
    def find(self, request: SequenceRequest, *, subscribers: int) -> Sequence | None:
        del request, subscribers
        return next(iter(self._sequences.values()), None)


class SharesWithAnybody(Scheduler):
    """Coalesces requests that differ."""

    def __init__(self, config: SchedulerConfig) -> None:
        """Start idle."""
        super().__init__(config)
        self._open.index = _Careless(is_on=config.coalesce)


class _NeverForgets(CoalescingIndex):
    def add(self, sequence: Sequence) -> None:
        self._sequences.setdefault(key_of(sequence.request), sequence)

    def remove(self, sequence: Sequence) -> None:
        del sequence


class LetsJoinTheDead(Scheduler):
    """A sequence that has ended can still be joined."""

    def __init__(self, config: SchedulerConfig) -> None:
        """Start idle."""
        super().__init__(config)
        self._open.index = _NeverForgets(is_on=config.coalesce)


class _NeverAlone(RunningSequences):
    @property
    def is_full(self) -> bool:
        return not self.slots.free_count or len(self) >= self.max_count


class LetsOthersJoinASuspect(Scheduler):
    """Admits sequences beside one that is to go on alone."""

    def _take_on(self, config: SchedulerConfig, prefixes: PrefixCache | None) -> RunningSequences:
        running = super()._take_on(config, prefixes)
        running.__class__ = _NeverAlone
        return running


class ForgetsToReplay(Scheduler):
    """Replays nothing to late subscribers."""

    def _taken_in(self, subscriber: Subscriber, sequence: Sequence, now_s: float) -> list[Event]:
        return super()._taken_in(subscriber, sequence, now_s)[:1]


class _LeaderTakesAllAlong(OpenSequences):
    def _end(
        self,
        subscriber: Subscriber,
        reason: FinishReason,
        now_s: float,
        error: MachdError | None = None,
        *,
        is_sound: bool = True,
        stop_token: SampledToken | None = None,
    ) -> SequenceFinished:
        sequence = self[subscriber.sequence_id]
        if reason is FinishReason.ABORT and subscriber is sequence.subscribers[0]:
            for follower in sequence.subscribers[1:]:
                super()._end(follower, reason, now_s, error)
        return super()._end(
            subscriber, reason, now_s, error, is_sound=is_sound, stop_token=stop_token
        )


class LeaderTakesAllAlong(Scheduler):
    """When the leader leaves, its followers are forgotten."""

    def __init__(self, config: SchedulerConfig) -> None:
        """Start idle."""
        super().__init__(config)
        self._open.__class__ = _LeaderTakesAllAlong


class StarvesTheSerialRow(Scheduler):
    """The batch always has the turn."""

    def plan(self) -> StepPlan:
        """Reset the turn."""
        self._planner.turn = Lane.BATCH
        return super().plan()


class DecodesHalfABatch(Scheduler):
    """Leaves a row out."""

    def plan(self) -> StepPlan:
        """Drop the last row."""
        plan = super().plan()
        return replace(plan, decode=plan.decode[:-1] if len(plan.decode) > 1 else plan.decode)


class QueuesWithoutBounds(Scheduler):
    """Takes in everything."""

    def _check_room(self, new: tuple[Sequence, ...]) -> None:
        del new


class NeverWakes(Scheduler):
    """Reports nothing due during the window."""

    def wait_s(self, now_s: float) -> float | None:
        """Nothing."""
        del now_s
        return None


class AdmitsWhileHeld(Scheduler):
    """Does not wait for what runs to end."""

    def hold_admission(self) -> None:
        """Hold nothing."""


class HoldsForGood(Scheduler):
    """Admits none after a new config."""

    def resume_admission(self) -> None:
        """Hold on."""


class KeepsTheUnfit(Scheduler):
    """Keeps a sequence that can never run at the head of the queue."""

    def _end_unfit(self, sequence: Sequence, now_s: float) -> list[Event]:
        del sequence, now_s
        return []


class TurnsAwayAtASwitch(Scheduler):
    """Ends waiting sequences beyond the new limits."""

    def apply_config(self, config: SchedulerConfig, now_s: float) -> list[Event]:
        """End those at the end of the queue."""
        events = super().apply_config(config, now_s)
        for sequence in list(self._waiting)[config.limits.max_queue :]:
            error = QueueFullError("too many")
            events += self._open.end(sequence, FinishReason.ERROR, now_s, error)
        return events


class ReordersAtASwitch(Scheduler):
    """Reverses the queue with a new config."""

    def apply_config(self, config: SchedulerConfig, now_s: float) -> list[Event]:
        """Turn the queue around."""
        turned = _TurnedAround(config.limits)
        for sequence in self._waiting:
            turned.add(sequence)
        self._open.waiting = turned
        return super().apply_config(config, now_s)


class _SharesForGood(CoalescingIndex):
    def switch(self, *, is_on: bool) -> None:
        self.is_on = is_on


class SharesAfterItIsSwitchedOff(Scheduler):
    """Keeps the coalescing index when coalescing is switched off."""

    def __init__(self, config: SchedulerConfig) -> None:
        """Start idle."""
        super().__init__(config)
        self._open.index = _SharesForGood(is_on=config.coalesce)


class KeepsTheOldSlots(Scheduler):
    """Keeps the slot count of the config before."""

    def apply_config(self, config: SchedulerConfig, now_s: float) -> list[Event]:
        """Put the slots of before back."""
        slots = self._running.slots
        events = super().apply_config(config, now_s)
        self._running.slots = slots
        return events


class DraftsForAll(Scheduler):
    """Allows drafts for every row, however many decode."""

    def plan(self) -> StepPlan:
        """Allow drafts in every row."""
        most = self._config.drafts.max_draft_tokens
        plan = super().plan()
        return replace(
            plan, decode=tuple(replace(one, max_draft_tokens=most) for one in plan.decode)
        )


class NeverDraftsAgain(Scheduler):
    """Allows no drafts once two rows have decoded together."""

    def plan(self) -> StepPlan:
        """Allow no drafts after the first batch."""
        self._is_over = getattr(self, "_is_over", False) or len(self._running) > 1
        plan = super().plan()
        if not self._is_over:
            return plan
        return replace(plan, decode=tuple(replace(one, max_draft_tokens=0) for one in plan.decode))


class LosesDrafts(Scheduler):
    """Drops all but the first token of each row in a step."""

    def commit(
        self, plan: StepPlan, result: StepResult, now_s: float, *, duration_s: float
    ) -> list[Event]:
        """Forget the others."""
        first = {token.slot_index: token for token in reversed(result.tokens)}
        others = [one for one in result.outputs if not isinstance(one, SampledToken)]
        result = replace(result, outputs=(*others, *first.values()))
        return super().commit(plan, result, now_s, duration_s=duration_s)


class GoesOnBehindTheEnd(Scheduler):
    """Emits tokens behind a stop token."""

    def _take(self, sequence: Sequence, output: RowOutput, now_s: float) -> list[Event]:
        if not isinstance(output, SampledToken) or output.token_id not in STOP_TOKENS:
            return super()._take(sequence, output, now_s)
        subscribers = [subscriber.sequence_id for subscriber in sequence.subscribers]
        events = super()._take(sequence, output, now_s)
        return [*events, *(OutputGenerated(one, output, now_s) for one in subscribers)]


class CountsNoDrafts(Scheduler):
    """Counts no drafts."""

    @property
    def draft_reading(self) -> DraftReading:
        """Nothing."""
        return DraftReading()


class StartsInSilence(Scheduler):
    """Emits no SequenceStarted."""

    def commit(
        self, plan: StepPlan, result: StepResult, now_s: float, *, duration_s: float
    ) -> list[Event]:
        """Leave it out."""
        events = super().commit(plan, result, now_s, duration_s=duration_s)
        return [one for one in events if not isinstance(one, SequenceStarted)]


class StartsInAnotherMode(Scheduler):
    """Reports the mode of the next step at the first token."""

    def _started(self, subscriber: Subscriber, sequence: Sequence, now_s: float) -> SequenceStarted:
        return SequenceStarted(
            subscriber.sequence_id, self._mode_of(sequence, self.step_mode), now_s
        )


class ChangesInSilence(Scheduler):
    """A change of mode is told a step late."""

    def _changed_mode(self) -> list[DecodeModeChanged]:
        late: list[DecodeModeChanged] = getattr(self, "_late", [])
        self._late = super()._changed_mode()
        return late


def _is_first_since_restart(sequence: Sequence) -> bool:
    """True if a sequence has the tokens of another engine process, and none since."""
    return 0 < sequence.completion_tokens == len(sequence.request.generated_token_ids)


class SendsATokenTwice(Scheduler):
    """Sends the last token of the process that died once more."""

    def _take(self, sequence: Sequence, output: RowOutput, now_s: float) -> list[Event]:
        if not isinstance(output, SampledToken) or not _is_first_since_restart(sequence):
            return super()._take(sequence, output, now_s)
        last = structs.replace(output, token_id=sequence.completion_token_ids[-1])
        again = [OutputGenerated(one.sequence_id, last, now_s) for one in sequence.subscribers]
        return [*again, *super()._take(sequence, output, now_s)]


class LosesAToken(Scheduler):
    """Sends nothing of the first token behind those of the process that died."""

    def _take(self, sequence: Sequence, output: RowOutput, now_s: float) -> list[Event]:
        is_lost = _is_first_since_restart(sequence)
        events = super()._take(sequence, output, now_s)
        return [one for one in events if not (is_lost and isinstance(one, OutputGenerated))]


class DrawsAtTheWrongPosition(Scheduler):
    """Takes the first token of the process that died for one of the prompt."""

    def plan(self) -> StepPlan:
        """Have one token fewer resumed."""
        plan = super().plan()
        return replace(plan, prefill=tuple(map(self._shortened, plan.prefill)))

    def _shortened(self, chunk: PrefillChunk) -> PrefillChunk:
        if self._running.at(chunk.slot_index).suspended_for is not SuspendReason.RESTART:
            return chunk
        return replace(chunk, resumed_tokens=max(0, chunk.resumed_tokens - 1))


class TimesOutInTheQueueAgain(Scheduler):
    """Forgets that a request has had a slot in the process that died."""

    def submit(self, requests: tuple[SequenceRequest, ...], now_s: float) -> list[Event]:
        """Have all begin in the queue."""
        formers = [
            one.resumption and replace(one.resumption, is_group_started=False) for one in requests
        ]
        pairs = zip(requests, formers, strict=True)
        return super().submit(
            tuple(replace(one, resumption=former) for one, former in pairs), now_s
        )


class RestartsMatchers(FakeEngine):
    """Begins the grammar of a resumed row anew."""

    def _prefill(self, chunk: PrefillChunk) -> list[SampledToken | RowFault]:
        said = super()._prefill(replace(chunk, is_last=False))
        if not chunk.is_last:
            return said
        row = self._rows[chunk.slot_index]
        matcher, row.matcher = row.matcher, None
        row.resume()
        row.matcher = matcher
        return self._next(chunk.slot_index, row)


class _ForgetfulSlots(Slots):
    def leave(self, slot_index: int) -> None:
        del self._occupied[slot_index]


class ForgetsToRelease(Scheduler):
    """The engine never learns that a slot was left."""

    def __init__(self, config: SchedulerConfig) -> None:
        """Start idle."""
        super().__init__(config)
        self._running.slots = _ForgetfulSlots(1)


class _KeepsFinishedInSlot(OpenSequences):
    def _retire(self, sequence: Sequence, *, is_sound: bool) -> None:
        if not sequence.is_running:
            super()._retire(sequence, is_sound=is_sound)


class KeepsFinishedInSlot(Scheduler):
    """Keeps the slot of a sequence without subscribers."""

    def __init__(self, config: SchedulerConfig) -> None:
        """Start idle."""
        super().__init__(config)
        self._open.__class__ = _KeepsFinishedInSlot


class _LosesWhoIsAbortedWhileWaiting(OpenSequences):
    def abort(
        self, sequence_ids: tuple[str, ...], error: MachdError | None, now_s: float
    ) -> list[Event]:
        for sequence in self.waiting:
            if sequence.request.sequence_id in sequence_ids:
                self.waiting.remove(sequence)
                del self._by_id[sequence.request.sequence_id]
        return super().abort(sequence_ids, error, now_s)


class LosesWhoIsAbortedWhileWaiting(Scheduler):
    """Emits nothing for an abort in the queue."""

    def __init__(self, config: SchedulerConfig) -> None:
        """Start idle."""
        super().__init__(config)
        self._open.__class__ = _LosesWhoIsAbortedWhileWaiting


class DeliversStopTokens(Scheduler):
    """Lets the token that ends a completion into its text."""

    def commit(
        self, plan: StepPlan, result: StepResult, now_s: float, *, duration_s: float
    ) -> list[Event]:
        """Announce every token."""
        events = super().commit(plan, result, now_s, duration_s=duration_s)
        if result.tokens and events and not isinstance(events[0], OutputGenerated):
            ended = events[0]
            assert isinstance(ended, SequenceFinished)
            return [OutputGenerated(ended.sequence_id, result.tokens[0], now_s), *events]
        return events


class CountsOneTokenTooMany(Scheduler):
    """Tells a wrong number at the end."""

    def commit(
        self, plan: StepPlan, result: StepResult, now_s: float, *, duration_s: float
    ) -> list[Event]:
        """Spoil the count."""
        return [
            structs.replace(event, completion_tokens=event.completion_tokens + 1)
            if isinstance(event, SequenceFinished)
            else event
            for event in super().commit(plan, result, now_s, duration_s=duration_s)
        ]


class _NeverTimesOut(OpenSequences):
    def expire(self, now_s: float) -> list[Event]:
        del now_s
        return []


class NeverTimesOut(Scheduler):
    """Expires no sequence."""

    def __init__(self, config: SchedulerConfig) -> None:
        """Start idle."""
        super().__init__(config)
        self._open.__class__ = _NeverTimesOut


class FailsInSilence(Scheduler):
    """Emits nothing after an engine fault."""

    def fail(
        self, error: MachdError, now_s: float, *, include_waiting: bool = False
    ) -> list[Event]:
        """Do it, and say nothing."""
        super().fail(error, now_s, include_waiting=include_waiting)
        return []
