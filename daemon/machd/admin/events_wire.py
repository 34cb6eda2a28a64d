"""The events of ``GET /admin/events``: what happened, without a token or a word of anybody's."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from machd.capabilities.document import DecodeMode


class _Happened(Struct, frozen=True, kw_only=True, tag_field="type"):
    """One event.

    Attributes:
        at: Seconds since 1970.
    """

    at: float


class StateChanged(_Happened, frozen=True, kw_only=True, tag="state"):
    """The daemon is in another state; also what a watcher is told first."""

    state: str


class SettingsChanged(_Happened, frozen=True, kw_only=True, tag="settings"):
    """Somebody asked for other settings; ``problems`` says why they are not in force."""

    kind: str
    ok: bool
    changed: list[str]
    problems: list[str]


class CapabilityChanged(_Happened, frozen=True, kw_only=True, tag="capability"):
    """A measurement while the engine was idle changed a verdict; the feature is on or off by it now."""

    feature: str
    verdict: str
    reason: str


class RequestQueued(_Happened, frozen=True, kw_only=True, tag="queued"):
    """A sequence waits; ``position`` 0 is next. Its id begins with its request's."""

    sequence_id: str
    position: int


class RequestAdmitted(_Happened, frozen=True, kw_only=True, tag="admitted"):
    """A sequence runs.

    Attributes:
        coalesced_with: The request id of whose decode it shares; null where it has its own.
    """

    sequence_id: str
    slot: int
    decode_mode: DecodeMode
    active_loops: int
    coalesced_with: str | None


class RequestFinished(_Happened, frozen=True, kw_only=True, tag="finished"):
    """A sequence ended; ``error`` is the code of why, for those that were ended or failed."""

    sequence_id: str
    reason: str
    error: str | None
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


class ModeChanged(_Happened, frozen=True, kw_only=True, tag="mode"):
    """From this step on tokens are made in another way, because sequences have come or gone."""

    previous: DecodeMode
    mode: DecodeMode


class StepComputed(_Happened, frozen=True, kw_only=True, tag="step"):
    """The engine computed a step.

    Attributes:
        width: Sequences that got tokens.
        prefill_tokens: Prompt tokens computed.
        certain_tokens: Tokens that were known beforehand and went along.
        drafted_tokens: Tokens that were guessed ahead and verified.
        accepted_tokens: Those that were right.
    """

    width: int
    prefill_tokens: int
    certain_tokens: int
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    duration_s: float


class FaultHappened(_Happened, frozen=True, kw_only=True, tag="fault"):
    """The engine failed, or its books do not add up; the log says more."""

    scope: Literal["engine", "invariant"]


class EventsDropped(_Happened, frozen=True, kw_only=True, tag="dropped"):
    """So many events before the next one were not read in time and are gone."""

    count: int


AdminEvent = (
    StateChanged
    | SettingsChanged
    | CapabilityChanged
    | RequestQueued
    | RequestAdmitted
    | RequestFinished
    | ModeChanged
    | StepComputed
    | FaultHappened
    | EventsDropped
)
