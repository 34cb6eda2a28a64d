"""Events of ``GET /admin/events``, without a token or a word of a request."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType, structs

from machd.capabilities.verdict import Support, Verdict
from machd.clock import Clock
from machd.errors import TooManyInFlightError
from machd.process.configuration import ChangeKind, LastChange
from machd.process.lifecycle import State
from machd.scheduler.events import (
    DecodeMode,
    DecodeModeChanged,
    EngineFaulted,
    Event,
    FinishReason,
    InvariantBroken,
    SequenceAdmitted,
    SequenceFinished,
    SequenceQueued,
    SequenceResumed,
    StepCompleted,
    SuspendReason,
)
from machd.served.turns import ModelState


class _Happened(Struct, frozen=True, kw_only=True, tag_field="type"):
    """One event.

    Attributes:
        at: Seconds since 1970.
    """

    at: float


class _HappenedToModel(_Happened, frozen=True, kw_only=True):
    """One event of a model, its engine or its sequences.

    Attributes:
        model: Name of the model; left out by a daemon of one model.
    """

    model: str | UnsetType = UNSET


class StateChanged(_Happened, frozen=True, kw_only=True, tag="state"):
    """The daemon is in another state; also what a watcher is told first."""

    state: State


class SettingsChanged(_Happened, frozen=True, kw_only=True, tag="settings"):
    """Other settings were asked for; ``problems`` says why they are not in force."""

    kind: ChangeKind
    ok: bool
    changed: list[str]
    problems: list[str]


class CapabilityChanged(_HappenedToModel, frozen=True, kw_only=True, tag="capability"):
    """A measurement while the engine was idle changed a verdict; the feature is on or off by it now."""

    feature: str
    verdict: Support
    reason: str


class RequestQueued(_HappenedToModel, frozen=True, kw_only=True, tag="queued"):
    """A sequence waits; ``position`` 0 is next. Its id begins with its request's."""

    sequence_id: str
    position: int


class RequestAdmitted(_HappenedToModel, frozen=True, kw_only=True, tag="admitted"):
    """A sequence runs.

    Attributes:
        coalesced_with: The request id of whose decode it shares; null where it has its own.
    """

    sequence_id: str
    slot: int
    decode_mode: DecodeMode
    active_loops: int
    coalesced_with: str | None


class RequestResumed(_HappenedToModel, frozen=True, kw_only=True, tag="resumed"):
    """A sequence that had lost its slot runs again, behind its completion so far."""

    sequence_id: str
    slot: int
    reason: SuspendReason
    completion_tokens: int


class RequestFinished(_HappenedToModel, frozen=True, kw_only=True, tag="finished"):
    """A sequence ended; ``error`` is the code of why, for those that were ended or failed."""

    sequence_id: str
    reason: FinishReason
    error: str | None
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


class ModeChanged(_HappenedToModel, frozen=True, kw_only=True, tag="mode"):
    """From this step on tokens are made in another way, because sequences have come or gone."""

    previous: DecodeMode
    mode: DecodeMode


class StepComputed(_HappenedToModel, frozen=True, kw_only=True, tag="step"):
    """The engine has done a step.

    Attributes:
        width: Sequences that got tokens.
        prefill_tokens: Prompt tokens computed.
        forced_tokens: Tokens that were known beforehand and went along.
        drafted_tokens: Draft tokens that were verified.
        accepted_tokens: Those that were right.
    """

    width: int
    prefill_tokens: int
    forced_tokens: int
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    duration_s: float


class FaultHappened(_HappenedToModel, frozen=True, kw_only=True, tag="fault"):
    """The engine failed, or its books do not add up; the log says more."""

    scope: Literal["engine", "invariant"]


class ModelChanged(_HappenedToModel, frozen=True, kw_only=True, tag="model"):
    """One of several models is in another state, or its load has come on.

    Attributes:
        stage: What its load does; null unless it loads, and before the first stage.
        progress: Bytes that its load has read of all that it reads, from 0 to 1; null unless it loads.
        failure: Why its load failed; null unless it did.
    """

    state: ModelState
    stage: str | None
    progress: float | None
    failure: str | None


class EventsDropped(_Happened, frozen=True, kw_only=True, tag="dropped"):
    """So many events before the next one were not read in time and are gone."""

    count: int


_ModelEvent = (
    CapabilityChanged
    | RequestQueued
    | RequestAdmitted
    | RequestResumed
    | RequestFinished
    | ModeChanged
    | StepComputed
    | FaultHappened
    | ModelChanged
)
AdminEvent = StateChanged | SettingsChanged | _ModelEvent | EventsDropped


MAX_WATCHERS = 4
"""Watchers at once: every one of them costs the event loop something with every step."""

MAX_UNREAD_EVENTS = 1024
"""Events that a watcher may leave unread before the oldest are dropped: some seconds of steps."""


class Watcher:
    """One watcher's unread events. Lives on the event loop."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._unread: deque[AdminEvent] = deque()
        self._dropped = 0
        self._is_ended = False
        self._wake = asyncio.Event()

    def push(self, event: AdminEvent) -> None:
        """Add an event, at the cost of the oldest where there is no room."""
        if self._is_ended:
            return
        if len(self._unread) >= MAX_UNREAD_EVENTS:
            self._unread.popleft()
            self._dropped += 1
        self._unread.append(event)
        self._wake.set()

    def end(self) -> None:
        """Let the watcher read what is left, and then nothing more."""
        self._is_ended = True
        self._wake.set()

    async def take(self) -> list[AdminEvent]:
        """Return the unread events, after how many were dropped; empty at the end."""
        await self._wake.wait()
        events = list(self._unread)
        if self._dropped:
            events.insert(0, EventsDropped(at=self._clock.unix_s(), count=self._dropped))
        self._unread.clear()
        self._dropped = 0
        if not self._is_ended:
            self._wake.clear()
        return events


class EventFeed:
    """Tells watchers of every change of the daemon and every event of its models. Lives on the event loop."""

    def __init__(self, clock: Clock, on_event: Callable[[], None] = lambda: None) -> None:
        """Begin without watchers; ``on_event`` is called with each event, and each step's, watched or not."""
        self._clock = clock
        self.on_event = on_event
        self._watchers: set[Watcher] = set()
        self._models: list[ModelFeed] = []

    @property
    def is_watched(self) -> bool:
        """Return whether a watcher is open."""
        return bool(self._watchers)

    @property
    def has_several_models(self) -> bool:
        """Return whether an event has to name its model."""
        return len(self._models) > 1

    def open(self) -> Watcher:
        """Watch from now on, until :meth:`close`; TooManyInFlightError beyond ``MAX_WATCHERS``."""
        if len(self._watchers) >= MAX_WATCHERS:
            raise TooManyInFlightError(
                f"{MAX_WATCHERS} others watch the events already; there is room for no more"
            )
        watcher = Watcher(self._clock)
        self._watchers.add(watcher)
        return watcher

    def close(self, watcher: Watcher) -> None:
        """Watch no longer; again is no mistake."""
        self._watchers.discard(watcher)

    def add_model(self, model_id: Callable[[], str | None]) -> ModelFeed:
        """Watch one more model.

        Args:
            model_id: Reads the model's name; None until it is known.
        """
        self._models.append(ModelFeed(self, self._clock, model_id))
        return self._models[-1]

    def forget_model(self, model: ModelFeed) -> None:
        """Watch a model no longer."""
        self._models.remove(model)

    def on_state(self, state: State) -> None:
        """The daemon is in another state; with the last one, every watch ends."""
        self.push(StateChanged(at=self._clock.unix_s(), state=state))
        if state is State.STOPPED:
            for watcher in self._watchers:
                watcher.end()

    def on_settings(self, change: LastChange) -> None:
        """Tell of an attempt to change the settings."""
        self.push(
            SettingsChanged(
                at=change.at_unix_s,
                kind=change.kind,
                ok=change.is_successful,
                changed=list(change.changed),
                problems=list(change.problems),
            )
        )

    def push(self, event: AdminEvent) -> None:
        """Hand an event to all watchers."""
        self.on_event()
        for watcher in self._watchers:
            watcher.push(event)


class ModelFeed:
    """Observes every event of one model."""

    def __init__(self, feed: EventFeed, clock: Clock, model_id: Callable[[], str | None]) -> None:
        """Tell the watchers of ``feed``; see :meth:`EventFeed.add_model`."""
        self._feed = feed
        self._clock = clock
        self._model_id = model_id

    def on_events(self, events: Sequence[Event]) -> None:
        """Hand a step's events to all watchers."""
        if not self._feed.is_watched:
            self._feed.on_event()
            return
        at = self._clock.unix_s()
        for event in events:
            shown = _shown(event, at)
            if shown is not None:
                self._push(shown)

    def on_verdict(self, feature: str, verdict: Verdict) -> None:
        """Something else is known of what the model can do."""
        self._push(
            CapabilityChanged(
                at=self._clock.unix_s(),
                feature=feature,
                verdict=verdict.support,
                reason=verdict.reason,
            )
        )

    def on_model(
        self,
        name: str,
        state: ModelState,
        *,
        stage: str | None,
        progress: float | None,
        failure: str | None,
    ) -> None:
        """Tell what one of several models does; see :class:`ModelChanged`."""
        self._feed.push(
            ModelChanged(
                at=self._clock.unix_s(),
                model=name,
                state=state,
                stage=stage,
                progress=progress,
                failure=failure,
            )
        )

    def _push(self, event: _ModelEvent) -> None:
        model_id = self._model_id()
        if model_id is not None and self._feed.has_several_models:
            event = structs.replace(event, model=model_id)
        self._feed.push(event)


_KINDS: Mapping[type[Event], type[_ModelEvent]] = MappingProxyType(
    {
        SequenceQueued: RequestQueued,
        SequenceAdmitted: RequestAdmitted,
        SequenceResumed: RequestResumed,
        SequenceFinished: RequestFinished,
        StepCompleted: StepComputed,
        DecodeModeChanged: ModeChanged,
    }
)
"""Events as operators see them. They see no tokens, and what was reused with the end of a sequence."""

_RENAMED = {"slot_index": "slot", "batch_width": "width"}


def _shown(event: Event, at: float) -> _ModelEvent | None:
    """An event as operators see it; None for one that they do not see."""
    if isinstance(event, EngineFaulted | InvariantBroken):
        is_engine = isinstance(event, EngineFaulted)
        return FaultHappened(at=at, scope="engine" if is_engine else "invariant")
    kind = _KINDS.get(type(event))
    if kind is None:
        return None
    facts: dict[str, Any] = {"at": at}
    facts |= {_RENAMED.get(name, name): value for name, value in structs.asdict(event).items()}
    if isinstance(event, SequenceFinished) and event.error is not None:
        facts["error"] = event.error.code
    return kind(**{name: facts[name] for name in kind.__struct_fields__ if name in facts})
