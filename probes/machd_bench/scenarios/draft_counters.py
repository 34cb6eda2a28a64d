"""Counters of drafts on a daemon's ``/metrics``."""

from __future__ import annotations

from collections import Counter

from prometheus_client.parser import text_string_to_metric_families

from machd_bench.server import Server

_PREFIX = "machd_speculation_"


async def read_counters(server: Server) -> Counter[str]:
    """The counters by name, without ``machd_speculation_`` and ``_total``; empty without any."""
    page = (await server.exchange("/metrics")).body.decode()
    return Counter(
        {
            sample.name.removeprefix(_PREFIX).removesuffix("_total"): int(sample.value)
            for family in text_string_to_metric_families(page)
            for sample in family.samples
            if sample.name.startswith(_PREFIX) and sample.name.endswith("_total")
            if "position" not in sample.labels
        }
    )
