"""The feed of events: its content, and what watchers never do."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from support.clocks.manual_clock import ManualClock
from support.daemon.serving_parts import admitted, finished, tokens

from machd.admin.event_feed import (
    MAX_UNREAD_EVENTS,
    MAX_WATCHERS,
    AdminEvent,
    CapabilityChanged,
    EventFeed,
    EventsDropped,
    StateChanged,
    Watcher,
)
from machd.capabilities.verdict import Support, Verdict
from machd.errors import RowFaultError, TooManyInFlightError
from machd.process.configuration import ChangeKind, LastChange
from machd.process.lifecycle import State
from machd.scheduler.events import (
    DecodeMode,
    DecodeModeChanged,
    EngineFaulted,
    FinishReason,
    InvariantBroken,
    SequenceQueued,
    StepCompleted,
)


def _kinds(events: list[AdminEvent]) -> list[str]:
    return [str(one.__struct_config__.tag) for one in events]


async def _is_silent(watcher: Watcher) -> bool:
    try:
        async with asyncio.timeout(0.02):
            await watcher.take()
    except TimeoutError:
        return True
    return False


async def test_a_watcher_sees_steps_and_sequences_and_no_tokens() -> None:
    """Every fact in its order; of tokens not even that there was one."""
    feed = EventFeed(ManualClock())
    model = feed.add_model(lambda: "m")
    watcher = feed.open()
    model.on_events(
        [
            SequenceQueued("s-1", 0),
            admitted("s-1"),
            DecodeModeChanged(DecodeMode.BATCHED, DecodeMode.SPECULATIVE),
            StepCompleted(1, 7, 0.25, 2, 5, 3),
            *tokens("s-1", "xyzzy"),
            finished("s-1", completion_tokens=5),
            finished("s-2", FinishReason.ERROR, RowFaultError("xyzzy")),
            EngineFaulted(),
            InvariantBroken("xyzzy"),
        ]
    )
    events = await watcher.take()
    assert _kinds(events) == [
        "queued", "admitted", "mode", "step", "finished", "finished", "fault", "fault",
    ]  # fmt: skip
    wire = msgspec.json.encode(events)
    assert b"xyzzy" not in wire
    mode, step, failed = events[2], events[3], events[5]
    assert msgspec.to_builtins(mode) == {
        "type": "mode",
        "at": mode.at,
        "previous": "batched",
        "mode": "speculative",
    }
    assert msgspec.to_builtins(step) == {
        "type": "step",
        "at": step.at,
        "width": 1,
        "prefill_tokens": 7,
        "forced_tokens": 2,
        "drafted_tokens": 5,
        "accepted_tokens": 3,
        "duration_s": 0.25,
    }
    assert msgspec.to_builtins(failed)["error"] == "row_fault"
    assert msgspec.json.decode(wire, type=list[AdminEvent]) == events


async def test_changes_of_state_and_settings_are_told() -> None:
    """To every watcher alike."""
    feed = EventFeed(ManualClock())
    watchers = [feed.open(), feed.open()]
    feed.on_state(State.DRAINING)
    feed.on_settings(LastChange(ChangeKind.RELOAD, 1.0, problems=("no",)))
    for watcher in watchers:
        state, settings = [msgspec.to_builtins(one) for one in await watcher.take()]
        assert (state["type"], state["state"]) == ("state", "draining")
        assert (settings["ok"], settings["problems"]) == (False, ["no"])
        assert await _is_silent(watcher)


async def test_who_does_not_read_loses_the_oldest_and_is_told() -> None:
    """The queue is bounded, the number of what is gone comes first, and once."""
    feed = EventFeed(ManualClock())
    model = feed.add_model(lambda: "m")
    watcher = feed.open()
    for position in range(MAX_UNREAD_EVENTS + 10):
        model.on_events([SequenceQueued("s", position)])
    dropped, *rest = await watcher.take()
    assert isinstance(dropped, EventsDropped)
    assert dropped.count == 10
    positions = [msgspec.to_builtins(one)["position"] for one in rest]
    assert positions == list(range(10, MAX_UNREAD_EVENTS + 10))
    feed.on_state(State.READY)
    assert _kinds(await watcher.take()) == ["state"]


async def test_there_are_only_so_many_watchers() -> None:
    """One more is refused until one has left; leaving twice counts once."""
    feed = EventFeed(ManualClock())
    watchers = [feed.open() for _ in range(MAX_WATCHERS)]
    with pytest.raises(TooManyInFlightError):
        feed.open()
    feed.close(watchers[0])
    feed.close(watchers[0])
    feed.open()
    with pytest.raises(TooManyInFlightError):
        feed.open()
    feed.on_state(State.READY)
    assert await _is_silent(watchers[0])


async def test_watchers_end_with_the_daemon() -> None:
    """They are told of the last state, and then there is nothing, however often they ask."""
    feed = EventFeed(ManualClock())
    watcher = feed.open()
    waiting = asyncio.create_task(watcher.take())
    await asyncio.sleep(0)
    feed.on_state(State.STOPPED)
    (last,) = await waiting
    assert isinstance(last, StateChanged)
    assert last.state == "stopped"
    feed.on_state(State.FAILED)
    assert await watcher.take() == []
    assert await watcher.take() == []


async def test_a_watcher_is_told_of_a_verdict_that_changed() -> None:
    """The feature, what is known of it now, and why."""
    feed = EventFeed(ManualClock())
    model = feed.add_model(lambda: "m")
    watcher = feed.open()
    model.on_verdict("prefix_cache", Verdict(Support.BLOCKED, "measured: it goes on differently"))
    (event,) = await watcher.take()
    assert isinstance(event, CapabilityChanged)
    assert (event.feature, event.verdict) == ("prefix_cache", "blocked")
    assert event.reason == "measured: it goes on differently"


async def test_events_name_their_model_when_there_are_several() -> None:
    """With one model the stream is what it was without names; the daemon's own events never have one."""
    feed = EventFeed(ManualClock())
    watcher = feed.open()
    first = feed.add_model(lambda: "first")
    first.on_events([SequenceQueued("s", 0)])
    second = feed.add_model(lambda: "second")
    loading = feed.add_model(lambda: None)
    for model in (first, second, loading):
        model.on_events([SequenceQueued("s", 0), EngineFaulted()])
    second.on_verdict("prefix_cache", Verdict(Support.BLOCKED, "measured: it goes on differently"))
    feed.on_state(State.DRAINING)
    feed.forget_model(second)
    feed.forget_model(loading)
    first.on_events([StepCompleted(1, 0, 0.1)])

    events = await watcher.take()
    wire = msgspec.json.encode(events)
    assert [one.get("model") for one in msgspec.json.decode(wire)] == [
        None, "first", "first", "second", "second", None, None, "second", None, None,
    ]  # fmt: skip
    assert msgspec.json.decode(wire, type=list[AdminEvent]) == events
    assert b'"model":null' not in wire
