"""What a daemon's ``/metrics`` say of its drafts."""

from __future__ import annotations

import asyncio
from collections import Counter

from prometheus_client.parser import text_string_to_metric_families

from machd_bench.report import Figure
from machd_bench.server import Server

_PREFIX = "machd_speculation_"
_DRAFTED = "draft_tokens"
_ACCEPTED = "accepted_tokens"
_BY_POSITION = ("draft_by_position_tokens", "accepted_by_position_tokens")
_SETTLED_AFTER_S = 0.05
_READINGS_AT_MOST = 20

DraftCounters = Counter[tuple[str, int]]
"""By name and position; 0 is all positions."""


def read_counters(page: str) -> DraftCounters:
    """Take the counters of drafts from a page of metrics; empty if there are none."""
    counters: DraftCounters = Counter()
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.name.startswith(_PREFIX) and sample.name.endswith("_total"):
                name = sample.name.removeprefix(_PREFIX).removesuffix("_total")
                counters[name, int(sample.labels.get("position", 0))] = int(sample.value)
    return counters


async def settled_counters(server: Server) -> DraftCounters:
    """The counters once they stay as they are; empty if the daemon says nothing of drafts."""
    counters = read_counters((await server.exchange("/metrics")).body.decode())
    for _ in range(_READINGS_AT_MOST):
        before = counters
        await asyncio.sleep(_SETTLED_AFTER_S)
        counters = read_counters((await server.exchange("/metrics")).body.decode())
        if counters == before:
            break
    return counters


def draft_figures(counters: DraftCounters, completion_tokens: int) -> dict[str, Figure]:
    """Sum up what became of drafts while so many tokens were answered.

    ``tokens_per_pass`` counts passes without drafts, too: every pass makes one token besides the
    drafted ones that it accepts, and the last pass may accept more than the answer has room for.
    """
    drafted, accepted = counters[_DRAFTED, 0], counters[_ACCEPTED, 0]
    return {
        "drafted_tokens": drafted,
        "accepted_tokens": accepted,
        "accepted_share": accepted / drafted if drafted else None,
        "tokens_per_pass": completion_tokens / max(1, completion_tokens - accepted),
        "cycles": counters["cycles", 0],
        "fallbacks": counters["fallbacks", 0],
    }


def accepted_by_position(counters: DraftCounters) -> list[float]:
    """The share of first, second, ... drafted tokens that were accepted with all before them."""
    drafted, accepted = _BY_POSITION
    positions = sorted(at for (name, at), count in counters.items() if name == drafted and count)
    return [counters[accepted, at] / counters[drafted, at] for at in positions]
