"""A bench measures a server that has made up its mind how it decodes."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import msgspec
import pytest
from support.clocks.polling import CEILING_S
from support.clocks.virtual_time import LoopClock

from machd.capabilities.verdict import Support, Verdict
from machd_bench import server as module
from machd_bench.connection import Address
from machd_bench.serve_process import ServeProcess
from machd_bench.server import Dialect, Server


def _capabilities(verdict: str) -> Any:
    """Make capabilities with the one field that is looked at."""
    return msgspec.defstruct("Facts", [("continuous_batching", Any)])(
        Verdict(Support(verdict), "why")
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
    assert decided.capabilities.continuous_batching.support == last


async def test_one_that_never_comes_is_not_waited_for_without_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After its time the server is measured as it is."""
    server = _server(["unknown", "unknown"], monkeypatch)
    decided = await server.when_measured(0.0)
    assert decided.capabilities is server.capabilities


async def test_a_bench_waits_for_the_process_that_measures() -> None:
    """It takes a core from the server; one that never ends is not waited for without end."""
    program = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'input()', 'machd_probes.worker'],"
        " stdin=subprocess.PIPE)\n"
        "print('started', flush=True)\n"
        "input()\n"
        "child.communicate(b'x')\n"
        "print('ended', flush=True)\n"
        "input()\n"
    )
    daemon = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", program),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert daemon.stdin is not None
    assert daemon.stdout is not None
    served = ServeProcess(daemon)
    await daemon.stdout.readline()
    assert served.is_measuring()
    await served.measured(0.0, LoopClock())
    assert served.is_measuring()
    daemon.stdin.write(b"\n")
    await daemon.stdout.readline()
    await served.measured(CEILING_S, LoopClock())
    assert not served.is_measuring()
    daemon.stdin.write(b"\n")
    await daemon.wait()
