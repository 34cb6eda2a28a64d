"""The feed of overviews: how often one is made, for how many, and that none is without a watcher."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext

import msgspec
import pytest
from msgspec import Struct

from machd.admin import overview_feed
from machd.admin.overview_feed import (
    INTERVAL_S,
    MAX_UNREAD_FRAMES,
    MAX_WATCHERS,
    OverviewFeed,
    OverviewWatcher,
)
from machd.errors import TooManyInFlightError
from machd.link.logged_event import LoggedEvent
from machd.process.lifecycle import State
from machd.telemetry.log_ring import LogRing


class _Body(Struct):
    number: int


class _Maker:
    """Makes overviews with growing numbers."""

    def __init__(self) -> None:
        self.count = 0

    async def __call__(self) -> Struct:
        self.count += 1
        return _Body(self.count)


def _feed(
    log: LogRing | None = None, *, models: asyncio.Event | None = None, is_active: bool = False
) -> OverviewFeed:
    return OverviewFeed(
        log or LogRing(), lambda: nullcontext(models or asyncio.Event()), lambda: is_active
    )


def _event(level: str) -> LoggedEvent:
    return LoggedEvent(
        timestamp="", level=level, logger="", event=f"test.{level}", model=None, fields={}
    )


def _names(frames: bytes) -> list[str]:
    return [
        one.removeprefix("event: ")
        for one in frames.decode().splitlines()
        if one.startswith("event: ")
    ]


async def _read_for(watcher: OverviewWatcher, seconds_s: float) -> bytes:
    """Read all that comes meanwhile."""
    read = b""
    try:
        async with asyncio.timeout(seconds_s):
            while True:
                read += await watcher.take()
    except TimeoutError:
        return read


async def test_overviews_come_at_most_four_times_a_second_however_much_changes() -> None:
    """A change with each turn of the event loop makes no more than one overview an interval."""
    feed, maker = _feed(), _Maker()
    watcher = feed.open(maker)
    event_loop = asyncio.get_running_loop()
    start_s = event_loop.time()
    while event_loop.time() - start_s < 5 * INTERVAL_S:
        feed.touch()
        await asyncio.sleep(0)
    assert 3 <= maker.count <= (event_loop.time() - start_s) / INTERVAL_S + 1
    watcher.close()


async def test_all_watchers_share_one_encoded_body() -> None:
    """With several watchers nothing is made or encoded more often than with one."""
    feed, maker = _feed(), _Maker()
    watchers = [feed.open(maker) for _ in range(3)]
    bodies = [await one.take() for one in watchers]
    assert bodies == [b'event: overview\ndata: {"number":1}\n\n'] * 3
    assert maker.count == 1
    for one in watchers:
        one.close()


async def test_nothing_is_made_while_no_one_watches() -> None:
    """Neither before the first watcher nor after the last; a later one gets a new overview at once."""
    feed, maker = _feed(), _Maker()
    feed.touch()
    feed.on_finished(_Body(7))
    await asyncio.sleep(2 * INTERVAL_S)
    assert maker.count == 0
    watcher = feed.open(maker)
    assert _names(await watcher.take()) == ["overview"], "what ended before is not told"
    watcher.close()
    watcher.close()
    made = maker.count
    feed.touch()
    await asyncio.sleep(2 * INTERVAL_S)
    assert maker.count == made
    late = feed.open(maker)
    assert _names(await late.take()) == ["overview"]
    late.close()


async def test_a_watcher_that_comes_later_gets_the_overview_at_once() -> None:
    """It need not wait for the next change."""
    feed, maker = _feed(), _Maker()
    first = feed.open(maker)
    await first.take()
    second = feed.open(maker)
    assert _names(await second.take()) == ["overview"]
    for one in (first, second):
        one.close()


async def test_a_change_of_a_model_makes_an_overview() -> None:
    """A request that waits for its model is shown at once, though no engine has heard of it."""
    models = asyncio.Event()
    feed, maker = _feed(models=models), _Maker()
    watcher = feed.open(maker)
    await watcher.take()
    models.set()
    assert _names(await watcher.take()) == ["overview"]
    watcher.close()


@pytest.mark.parametrize("is_active", [False, True])
async def test_an_overview_comes_without_a_change(
    monkeypatch: pytest.MonkeyPatch,
    is_active: bool,  # noqa: FBT001
) -> None:
    """At rest seldom; while requests are open more often, because their times go on."""
    other_s = 3600.0
    monkeypatch.setattr(overview_feed, "ACTIVE_INTERVAL_S", 0.3 if is_active else other_s)
    monkeypatch.setattr(overview_feed, "REST_INTERVAL_S", other_s if is_active else 0.3)
    feed, maker = _feed(is_active=is_active), _Maker()
    watcher = feed.open(maker)
    await watcher.take()
    assert _names(await watcher.take()) == ["overview"]
    watcher.close()


async def test_finished_requests_and_log_events_are_told_once() -> None:
    """Each as an event of its own; of the log, what is worth reading and is new."""
    log, maker = LogRing(), _Maker()
    log.add(_event("error"))
    feed = _feed(log)
    watcher = feed.open(maker)
    await watcher.take()
    feed.on_finished(_Body(7))
    for level in ("debug", "info", "warning"):
        log.add(_event(level))
    read = await _read_for(watcher, 4 * INTERVAL_S)
    assert sorted(set(_names(read))) == ["finished", "log", "overview"]
    assert read.count(b'data: {"number":7}') == 1
    told = [
        one["event"]
        for line in read.decode().splitlines()
        if line.startswith("data: [")
        for one in msgspec.json.decode(line.removeprefix("data: "))
    ]
    assert told == ["test.info", "test.warning"]
    watcher.close()


async def test_a_watcher_that_does_not_read_holds_one_overview_and_a_bounded_rest() -> None:
    """Its memory does not grow with what happens."""
    feed, maker = _feed(), _Maker()
    watcher = feed.open(maker)
    for number in range(MAX_UNREAD_FRAMES + 100):
        feed.on_finished(_Body(number))
    await asyncio.sleep(3 * INTERVAL_S)
    names = _names(await watcher.take())
    assert names.count("finished") == MAX_UNREAD_FRAMES
    assert names.count("overview") == 1
    watcher.close()


async def test_there_is_room_for_some_watchers_only() -> None:
    """Another one is refused, until one has left."""
    feed, maker = _feed(), _Maker()
    watchers = [feed.open(maker) for _ in range(MAX_WATCHERS)]
    with pytest.raises(TooManyInFlightError):
        feed.open(maker)
    watchers.pop().close()
    watchers.append(feed.open(maker))
    for one in watchers:
        one.close()


async def test_a_watch_ends_with_the_daemon() -> None:
    """What is left is read, then nothing."""
    feed, maker = _feed(), _Maker()
    watcher = feed.open(maker)
    await watcher.take()
    feed.on_state(State.STOPPED)
    while await watcher.take():
        pass
    watcher.close()


async def test_a_watch_ends_when_no_overview_can_be_made() -> None:
    """A watcher is not left with an old overview for ever."""

    async def fail() -> Struct:
        raise ValueError("planted")

    feed = _feed()
    asyncio.get_running_loop().set_exception_handler(lambda _loop, _context: None)
    watcher = feed.open(fail)
    assert await watcher.take() == b""
    watcher.close()
