"""A daemon trims its heap between requests, and never while one is open."""

from __future__ import annotations

import threading

import httpx
import pytest
from support.clocks.polling import CEILING_S, wait_until
from support.daemon.running_daemon import RunningDaemon
from support.engines.dialogue import completion, told
from support.engines.fake_engine import FakeEngine
from support.engines.step_gate import StepGate

from machd.process.idle_heap import IdleHeap


class _Counts:
    """Counts of a daemon's looks at its heap, and of its trims."""

    def __init__(self) -> None:
        self.looks = 0
        self.trims = 0

    def trim(self) -> None:
        """Trim nothing."""
        self.trims += 1

    def wait_for_looks(self) -> None:
        """Wait for three further looks: what was under way before the first of them is over."""
        until = self.looks + 3
        wait_until(lambda: self.looks >= until, "the daemon looks at its heap")


@pytest.fixture(name="counts")
def _counts(monkeypatch: pytest.MonkeyPatch) -> _Counts:
    """A heap that is worth trimming at every look, and is looked at often."""
    counts = _Counts()
    look = IdleHeap.look

    async def counted(self: IdleHeap) -> None:
        await look(self)
        counts.looks += 1

    monkeypatch.setattr(IdleHeap, "look", counted)
    monkeypatch.setattr("machd.process.idle_heap.find_heap_trim", lambda: counts.trim)
    monkeypatch.setattr("machd.process.idle_heap._INTERVAL_S", 0.01)
    monkeypatch.setattr("machd.process.idle_heap._GROWTH_BYTES", 0)
    return counts


def test_heap_is_trimmed_between_requests_and_not_while_one_is_open(counts: _Counts) -> None:
    """Trims stop while an answer is computed, and go on after it."""
    gate = StepGate()
    with RunningDaemon(lambda: FakeEngine(told, before_step=gate)) as daemon, gate:
        wait_until(lambda: counts.trims > 0, "the ready daemon is trimmed")
        url = f"{daemon.url}/v1/completions"
        client = threading.Thread(target=httpx.post, args=(url,), kwargs={"json": completion()})
        client.start()
        gate.wait_until_held()
        counts.wait_for_looks()
        trims = counts.trims
        counts.wait_for_looks()
        assert counts.trims == trims
        gate.open()
        client.join(CEILING_S)
        wait_until(lambda: counts.trims > trims, "the idle daemon is trimmed")
