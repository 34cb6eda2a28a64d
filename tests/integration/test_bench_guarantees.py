"""``machd bench --guarantees`` on real processes: what it measures, not how fast this machine is."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from support.checkpoints.tiny_checkpoint import write_tiny_llama
from support.daemon.serve_process import servers_of_this_process

from machd.bench.guarantees.run import OF_REQUESTS, OF_STOPS, GuaranteesBench
from machd.bench.progress import BenchProgress
from machd.bench.workload import Workload
from machd.clock import SystemClock


@pytest.mark.long
async def test_every_guarantee_has_a_figure(tmp_path: Path) -> None:
    """One try of each, on processes of a tiny model; all of them have ended afterwards."""
    others = servers_of_this_process()
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    model = await asyncio.to_thread(write_tiny_llama, tmp_path / "tiny-llama")
    workload = Workload(1, 1, 1, seed=1)
    bench = GuaranteesBench(workload, clock=SystemClock(), progress=BenchProgress(), tries=1)

    report = await bench.measure([str(model)])

    rows = report.guarantees
    names = [one.name for one in OF_REQUESTS] + [one.name for one in OF_STOPS]
    assert [one.guarantee for one in rows] == names
    assert [(one.guarantee, one.reason) for one in rows if one.reason is not None] == []
    for one in rows:
        assert one.tries == 1
        assert one.p50_s is not None
        assert one.p50_s == one.worst_s
    assert [one.figure for one in report.goals] == [one.worst_s for one in rows]
    (server,) = report.servers
    assert server.mode == "guarantees"
    assert servers_of_this_process() == others
