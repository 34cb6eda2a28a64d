"""A bench measures a server that has made up its mind how it decodes."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from support.clocks.virtual_time import LoopClock

from machd_bench import server as module
from machd_bench.connection import Address
from machd_bench.server import Dialect, Server


def _capabilities(verdict: str) -> Any:
    """What the bench looks at."""
    return msgspec.defstruct("Facts", [("continuous_batching", Any)])(
        msgspec.defstruct("Verdict", [("verdict", str)])(verdict)
    )


def _server(verdicts: list[str], monkeypatch: pytest.MonkeyPatch) -> Server:
    """A server that says one verdict after the other, the last one for ever."""

    async def look_up(_server: Server, _path: str, _kind: type[object]) -> Any:
        return _capabilities(verdicts.pop(0) if len(verdicts) > 1 else verdicts[0])

    monkeypatch.setattr(Server, "look_up", look_up)
    monkeypatch.setattr(module, "_MEASURING_POLL_S", 0.0)
    first = _capabilities(verdicts.pop(0))
    return Server(Address("127.0.0.1", 1, is_tls=False), LoopClock(), "m", Dialect(), first)


@pytest.mark.parametrize("last", ["supported", "blocked"])
async def test_a_verdict_that_is_being_measured_is_waited_for(
    last: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a first start the daemon serves one request at a time until it is there."""
    server = _server(["unknown", "unknown", "unknown", last], monkeypatch)
    decided = await server.when_measured(60.0)
    assert decided.capabilities is not None
    assert decided.capabilities.continuous_batching is not None
    assert decided.capabilities.continuous_batching.verdict == last


async def test_one_that_never_comes_is_not_waited_for_without_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After its time the server is measured as it is."""
    server = _server(["unknown", "unknown"], monkeypatch)
    decided = await server.when_measured(0.0)
    assert decided.capabilities is server.capabilities
