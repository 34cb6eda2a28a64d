"""``machd check --cache-report``: what it makes of sessions as coding clients sent them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.clients.planted_changes import PLANTS, Plant
from support.clients.recorded_sessions import RecordedRequest
from support.engines.fake_engine import FakeEngine

from machd.cli.cache_report import CacheReporter
from machd.cli.cache_report_document import CacheReport
from machd.cli.recorded_requests import recorded_requests
from machd.scheduler.events import CacheReason
from machd.scheduler.prefix_limits import BlockCosts, PrefixConfig, PrefixLimits

_ROOM = PrefixLimits(max_bytes=1 << 40)
_FRONT = FakeEngine(context_tokens=1 << 20)


def report_of(
    requests: Sequence[RecordedRequest],
    folder: Path,
    *,
    clients: Sequence[str] = (),
    limits: PrefixLimits = _ROOM,
    costs: BlockCosts = BlockCosts(1024),  # noqa: B008 - frozen
) -> CacheReport:
    """Return the report of requests, which each client of ``clients`` sent in turn."""
    lines = [
        {"path": one.path, "body": one.body, "client": name}
        for one, name in zip(requests, clients or ["someone"] * len(requests), strict=True)
    ]
    file = folder / "requests.jsonl"
    file.write_text("".join(json.dumps(one) + "\n" for one in lines), "utf-8")
    reporter = CacheReporter(_FRONT, PrefixConfig(b"", 256, costs), limits, is_shared=False)
    for one in recorded_requests(file):
        reporter.add(one)
    return reporter.report()


@pytest.mark.parametrize("plant", PLANTS, ids=lambda one: one.name)
def test_cache_report_names_planted_change(plant: Plant, tmp_path: Path) -> None:
    """The report names what a session's request has changed of the one before: the kind, the message, the tool, the text."""
    former, later = plant.requests()

    report = report_of([former, later], tmp_path)

    assert not report.skipped
    lookup = report.lookups[1]
    found = [(one.change, one.message_index, one.role, one.tool_index) for one in report.causes]
    if plant.kind is None:
        assert (lookup.reason, found) == (CacheReason.CONTINUED, [])
        return
    assert found == [(plant.kind, plant.message_index, plant.role, plant.tool_index)]
