"""Downloads of a daemon end for those that follow them, whatever fails on the way."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable

import msgspec
import pytest
from structlog.testing import capture_logs
from support.clocks.polling import CEILING_S

from machd.engine.protocol.downloads import (
    Downloaded,
    DownloadEvent,
    DownloadFailed,
    DownloadOrder,
)
from machd.errors import ConflictError
from machd.served.downloads import Downloads, DownloadWatch, OnPulled

_DONE = Downloaded(model="org/name", revision="a1", path="/models/name", total_bytes=1)
_ORDER = DownloadOrder(model="org/name", revision="main")


def _downloads(on_pulled: OnPulled) -> Downloads:
    """Downloads whose program says at once that all has come."""
    line = msgspec.json.encode(_DONE).decode()
    return Downloads(on_pulled, (sys.executable, "-c", f"print({line!r})"))


def _run(test: Callable[[], Awaitable[None]]) -> None:
    """Run a test on an event loop, and let the pipes of ended processes close."""

    async def run() -> None:
        await test()
        for _ in range(10):
            await asyncio.sleep(0)

    asyncio.run(run())


async def _last(watch: DownloadWatch) -> DownloadEvent:
    async with asyncio.timeout(CEILING_S):
        return [event async for event in watch.events(CEILING_S)][-1]


async def _fail(_done: Downloaded) -> None:
    raise RuntimeError("a bug")


def test_a_model_that_cannot_be_taken_on_is_told_as_here() -> None:
    """A bug while it is taken on is logged, and the download ends with a note."""

    async def run() -> None:
        downloads = _downloads(_fail)
        last = await _last(await downloads.follow(_ORDER))
        assert isinstance(last, Downloaded)
        assert last.note == "it is here, and not served yet: the log says why"
        assert downloads.state is None

    with capture_logs() as logs:
        _run(run)
    assert "settings.change_failed" in {one["event"] for one in logs}


def test_a_bug_ends_a_download_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients hear of the end, the log says why, and another download may begin."""

    async def broken(*_command: str, **_options: object) -> asyncio.subprocess.Process:
        raise RuntimeError("a bug")

    async def nothing(_done: Downloaded) -> None:
        pass

    async def run() -> None:
        downloads = _downloads(nothing)
        last = await _last(await downloads.follow(_ORDER))
        assert isinstance(last, DownloadFailed)
        assert last.code == "fault"
        assert downloads.state is None

    monkeypatch.setattr(asyncio, "create_subprocess_exec", broken)
    with capture_logs() as logs:
        _run(run)
    (failed,) = (one for one in logs if one["event"] == "model.download_failed")
    assert isinstance(failed["exc_info"], RuntimeError)


def test_a_model_that_has_come_is_taken_on_although_the_last_client_leaves() -> None:
    """What is taken on is not broken off half-way; there is nothing to stop any more."""

    async def run() -> None:
        begun, may_end, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def take_on(_done: Downloaded) -> None:
            begun.set()
            await may_end.wait()
            ended.set()

        downloads = _downloads(take_on)
        watch = await downloads.follow(_ORDER)
        async with asyncio.timeout(CEILING_S):
            await begun.wait()
            watch.close()
            assert downloads.cancel() is None
            await asyncio.sleep(0)
            may_end.set()
            await ended.wait()
            await downloads.stop()

    _run(run)


def test_a_download_waits_for_the_end_of_one_whose_client_leaves() -> None:
    """The server notices that a little later; as long as a client follows the first one, the second is refused."""

    async def run() -> None:
        downloads = Downloads(command=(sys.executable, "-c", "import time; time.sleep(600)"))
        first = await downloads.follow(_ORDER)
        other = DownloadOrder(model="org/other", revision="main")
        with pytest.raises(ConflictError, match="org/name is being fetched"):
            await downloads.follow(other)
        second = asyncio.create_task(downloads.follow(other))
        await asyncio.sleep(0)
        assert not second.done()
        first.close()
        async with asyncio.timeout(CEILING_S):
            await second
            state = downloads.state
            await downloads.stop()
        assert state is not None
        assert state.model == "org/other"

    _run(run)


def test_a_daemon_that_stops_does_not_wait_for_a_model_to_be_taken_on() -> None:
    """Taking it on may hang in the file system; the client hears that the download was stopped."""

    async def run() -> None:
        begun = asyncio.Event()

        async def hang(_done: Downloaded) -> None:
            begun.set()
            await asyncio.Event().wait()

        downloads = _downloads(hang)
        watch = await downloads.follow(_ORDER)
        async with asyncio.timeout(CEILING_S):
            await begun.wait()
            await downloads.stop()
        last = await _last(watch)
        assert isinstance(last, DownloadFailed)
        assert last.code == "operator_abort"

    _run(run)
