"""What a daemon's ``/metrics`` say of its drafts."""

from __future__ import annotations

import asyncio
from collections import Counter

from prometheus_client.parser import text_string_to_metric_families

from machd_bench.server import Server

_PREFIX = "machd_speculation_"
_SETTLED_AFTER_S = 0.05
_READINGS_AT_MOST = 20


async def settled_counters(server: Server) -> Counter[str]:
    """The counters once they stay as they are; empty if the daemon says nothing of drafts.

    Keys are names of metrics without ``machd_speculation_`` and ``_total``.
    """
    before = counters = await _read(server)
    for _ in range(_READINGS_AT_MOST):
        await asyncio.sleep(_SETTLED_AFTER_S)
        before, counters = counters, await _read(server)
        if counters == before:
            break
    return counters


async def _read(server: Server) -> Counter[str]:
    page = (await server.exchange("/metrics")).body.decode()
    return Counter(
        {
            sample.name.removeprefix(_PREFIX).removesuffix("_total"): int(sample.value)
            for family in text_string_to_metric_families(page)
            for sample in family.samples
            if sample.name.startswith(_PREFIX) and sample.name.endswith("_total")
            if not sample.labels
        }
    )
