"""The prefix cache on the metrics page: every figure of a snapshot, at every scrape."""

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace
from support.clocks.manual_clock import ManualClock
from support.daemon.engine_thread import ScriptedScheduling
from support.daemon.scraping import Page, metrics_of_one_model
from support.engines.fake_engine import FakeEngine

from machd.engine.protocol.memory import DiskReading, MemoryReading
from machd.engine_process.loop import EngineLoop
from machd.link.snapshot import LoopSnapshot
from machd.scheduler.prefix_limits import PrefixReading
from machd.served.served_model import ServedModel
from machd.settings.model import Settings
from machd.settings.sources import SettingsSources
from machd.telemetry.gauges import watch_caches

_READING = PrefixReading(
    queries=60,
    hits=40,
    prefix_hits=12,
    misses=8,
    entries=7,
    blocks=34,
    shared_blocks=20,
    pinned_blocks=3,
    bytes=1000,
    pinned_bytes=100,
    bytes_saved=500,
    limit_bytes=4000,
    evictions=5,
    saved_blocks=9,
    saved_bytes=300,
)
_MEMORY = MemoryReading(
    0, 0, 0, 0, disk=DiskReading(bytes=250, written=11, loaded=6, damaged=1, dropped=2)
)


class _Watched:
    """Metrics that read a loop whose thread never runs."""

    def __init__(self) -> None:
        clock = ManualClock()
        sources = SettingsSources(None, {}, {"cache.disk_budget_gb": 2.0})
        self.metrics, model = metrics_of_one_model()
        self.loop = EngineLoop(
            load=FakeEngine,
            scheduling=ScriptedScheduling(),
            settings=Settings(),
            publish=lambda _events: None,
            clock=clock,
        )
        settings = sources.load().settings
        served = ServedModel(self.loop, Settings, lambda: None)
        watch_caches(model, served, lambda: settings)

    def note(self, snapshot: LoopSnapshot) -> Page:
        self.loop._snapshots.newest = snapshot
        return Page(self.metrics)


@pytest.fixture(name="watched")
async def _watched() -> _Watched:
    await asyncio.sleep(0)
    return _Watched()


async def test_every_figure_is_shown(watched: _Watched) -> None:
    """Each under its name, with the state, the kind or the outcome that it is about."""
    page = watched.note(LoopSnapshot(prefix=_READING, memory=_MEMORY))
    assert page.value("machd_prefix_cache_queries_total") == 60
    assert page.series("machd_prefix_cache_hits_total") == {("full",): 40, ("prefix",): 12}
    assert page.value("machd_prefix_cache_bytes") == 1000
    assert page.value("machd_prefix_cache_limit_bytes") == 4000
    assert page.value("machd_prefix_cache_saved_bytes") == 500
    assert page.value("machd_prefix_cache_entries") == 7
    assert page.value("machd_prefix_cache_evictions_total") == 5
    assert page.series("machd_prefix_cache_blocks") == {
        ("held",): 34,
        ("pinned",): 3,
        ("shared",): 20,
        ("disk",): 9,
    }
    assert page.value("machd_block_files_bytes") == 250
    assert page.value("machd_block_files_budget_bytes") == 2e9
    assert page.series("machd_block_files_total") == {
        ("written",): 11,
        ("loaded",): 6,
        ("damaged",): 1,
        ("dropped",): 2,
    }


async def test_they_are_read_at_every_scrape(watched: _Watched) -> None:
    """A counter goes on with the engine's, and is a counter on the page."""
    watched.note(LoopSnapshot(prefix=_READING))
    page = watched.note(LoopSnapshot(prefix=replace(_READING, queries=61, misses=9)))
    assert page.value("machd_prefix_cache_queries_total") == 61
    assert page.families["machd_prefix_cache_queries"].type == "counter"


async def test_without_a_cache_all_is_zero(watched: _Watched) -> None:
    """Every series is there, so that a rate has its first value."""
    page = watched.note(LoopSnapshot())
    names = [name for name in page.families if "prefix_cache" in name or "block_files" in name]
    assert len(names) == 12
    for name in names:
        suffix = "_total" if page.families[name].type == "counter" else ""
        assert set(page.series(name + suffix).values()) == {0}


async def test_a_cache_of_any_size_has_no_limit(watched: _Watched) -> None:
    """A share of it is 0, not a division by 0."""
    page = watched.note(LoopSnapshot(prefix=replace(_READING, limit_bytes=None)))
    assert page.value("machd_prefix_cache_limit_bytes") == float("inf")
