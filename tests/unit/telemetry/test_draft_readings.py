"""Speculation on the metrics page: every count of a snapshot, at every scrape."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest
from support.clocks.manual_clock import ManualClock
from support.daemon.engine_thread import ScriptedScheduling
from support.daemon.scraping import Page, metrics_of_one_model
from support.engines.fake_engine import FakeEngine

from machd.engine_process.loop import EngineLoop
from machd.link.snapshot import LoopSnapshot
from machd.scheduler.draft_reading import DraftReading
from machd.served.served_model import ServedModel
from machd.settings.model import Settings
from machd.settings.sources import SettingsSources
from machd.telemetry.gauges import watch_drafts

_READING = DraftReading(
    cycles=5,
    drafted_tokens=12,
    accepted_tokens=7,
    drafted_by_position=(5, 4, 3),
    accepted_by_position=(4, 2, 1),
    fallbacks=2,
)
_DRAFTED = "machd_speculation_draft_by_position_tokens_total"
_ACCEPTED = "machd_speculation_accepted_by_position_tokens_total"


class _Watched:
    """Metrics that read a loop whose thread never runs."""

    def __init__(self, flags: Mapping[str, object]) -> None:
        clock = ManualClock()
        sources = SettingsSources(None, {}, flags)
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
        watch_drafts(model, served, lambda: settings)

    def note(self, drafts: DraftReading) -> Page:
        self.loop._snapshots.newest = LoopSnapshot(drafts=drafts)
        return Page(self.metrics)


async def _watched(**section: object) -> _Watched:
    await asyncio.sleep(0)
    return _Watched({f"speculation.{key}": value for key, value in section.items()})


async def test_every_count_is_shown() -> None:
    """Each under its name, those by position from 1 on, and all of them as counters."""
    page = (await _watched(max_draft_tokens=3)).note(_READING)
    assert page.value("machd_speculation_cycles_total") == 5
    assert page.value("machd_speculation_draft_tokens_total") == 12
    assert page.value("machd_speculation_accepted_tokens_total") == 7
    assert page.value("machd_speculation_fallbacks_total") == 2
    assert page.series(_DRAFTED) == {("1",): 5, ("2",): 4, ("3",): 3}
    assert page.series(_ACCEPTED) == {("1",): 4, ("2",): 2, ("3",): 1}
    assert page.families[_ACCEPTED.removesuffix("_total")].type == "counter"


async def test_positions_add_up_to_the_whole() -> None:
    """What is told by position is what is told together."""
    page = (await _watched()).note(_READING)
    assert sum(page.series(_DRAFTED).values()) == 12
    assert sum(page.series(_ACCEPTED).values()) == 7


async def test_positions_are_there_before_the_first_draft() -> None:
    """A rate needs the zero before: as many as the settings allow."""
    page = (await _watched(max_draft_tokens=2)).note(DraftReading())
    assert page.series(_DRAFTED) == page.series(_ACCEPTED) == {("1",): 0, ("2",): 0}


async def test_a_position_that_had_drafts_stays() -> None:
    """A lower maximum of drafts does not drop counts of higher positions."""
    page = (await _watched(max_draft_tokens=1)).note(_READING)
    assert page.series(_ACCEPTED) == {("1",): 4, ("2",): 2, ("3",): 1}


async def test_switched_off_there_are_no_positions() -> None:
    """No series that nothing can ever be counted in."""
    page = (await _watched(mode="off")).note(DraftReading())
    assert page.series(_DRAFTED) == page.series(_ACCEPTED) == {}
    assert page.value("machd_speculation_draft_tokens_total") == 0


@pytest.mark.parametrize("most", [1, 64])
async def test_there_are_never_more_series_than_drafts(most: int) -> None:
    """The settings bound the page."""
    page = (await _watched(max_draft_tokens=most)).note(DraftReading())
    assert len(page.series(_DRAFTED)) == most
