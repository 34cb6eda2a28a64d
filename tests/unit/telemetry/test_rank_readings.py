"""Ranks on the metrics page: memory and heartbeat of each, at every scrape."""

from __future__ import annotations

from support.clocks.manual_clock import ManualClock
from support.daemon.engine_thread import ScriptedScheduling
from support.daemon.scraping import Page, metrics_of_one_model
from support.engines.fake_engine import FakeEngine

from machd.engine.protocol.memory import MemoryReading, RankReading
from machd.engine_process.loop import EngineLoop
from machd.link.snapshot import LoopSnapshot
from machd.served.served_model import ServedModel
from machd.settings.model import Settings
from machd.telemetry.gauges import watch_ranks


def _page(*moments: tuple[RankReading, ...]) -> Page:
    """Watch the ranks of the first moment, and scrape at the last."""
    loop = EngineLoop(
        load=FakeEngine,
        scheduling=ScriptedScheduling(),
        settings=Settings(),
        publish=lambda _events: None,
        clock=ManualClock(),
    )
    metrics, model = metrics_of_one_model()
    for number, ranks in enumerate(moments):
        loop._snapshots.newest = LoopSnapshot(memory=MemoryReading(0, 0, 0, 0, ranks=ranks))
        if number == 0:
            watch_ranks(model, ServedModel(loop, Settings, lambda: None))
    return Page(metrics)


def test_each_rank_has_its_newest_memory_and_heartbeat() -> None:
    """A scrape shows what the last collective told."""
    first = (RankReading(0, 1, 2, 3.0), RankReading(1, 4, 5, 6.0))
    last = (RankReading(0, 10, 20, 30.0), RankReading(1, 40, 50, 60.0))
    page = _page(first, last)

    assert page.value("machd_rank_memory_bytes", rank="0", kind="active") == 10
    assert page.value("machd_rank_memory_bytes", rank="1", kind="available") == 50
    assert page.value("machd_rank_heartbeat_timestamp_seconds", rank="1") == 60


def test_one_process_has_no_series_of_ranks() -> None:
    """A model that this process computes alone has no ranks to show."""
    assert 'rank="' not in _page(()).text
