"""What the metrics of the prefix cache and its disk tier show: the engine thread's own counts."""

from __future__ import annotations

import math
from collections.abc import Callable

from machd.engine.protocol.engine import DiskReading
from machd.scheduler.prefix_limits import PrefixReading
from machd.serving.configuration import Configuration
from machd.serving.loop import EngineLoop
from machd.telemetry.metrics import Metrics

_GB = 1_000_000_000
_NO_PREFIX = PrefixReading(limit_bytes=0)
_NO_DISK = DiskReading()

_PREFIX: tuple[tuple[str, dict[str, str], Callable[[PrefixReading], float]], ...] = (
    ("machd_prefix_cache_queries_total", {}, lambda now: now.queries),
    ("machd_prefix_cache_hits_total", {"kind": "full"}, lambda now: now.hits),
    ("machd_prefix_cache_hits_total", {"kind": "prefix"}, lambda now: now.prefix_hits),
    ("machd_prefix_cache_bytes", {}, lambda now: now.bytes),
    (
        "machd_prefix_cache_limit_bytes",
        {},
        lambda now: math.inf if now.limit_bytes is None else now.limit_bytes,
    ),
    ("machd_prefix_cache_saved_bytes", {}, lambda now: now.bytes_saved),
    ("machd_prefix_cache_entries", {}, lambda now: now.entries),
    ("machd_prefix_cache_blocks", {"state": "held"}, lambda now: now.blocks),
    ("machd_prefix_cache_blocks", {"state": "pinned"}, lambda now: now.pinned_blocks),
    ("machd_prefix_cache_blocks", {"state": "shared"}, lambda now: now.shared_blocks),
    ("machd_prefix_cache_blocks", {"state": "disk"}, lambda now: now.saved_blocks),
    ("machd_prefix_cache_evictions_total", {}, lambda now: now.evictions),
)
_DISK: tuple[tuple[str, dict[str, str], Callable[[DiskReading], float]], ...] = (
    ("machd_block_files_bytes", {}, lambda now: now.bytes),
    ("machd_block_files_total", {"outcome": "written"}, lambda now: now.written),
    ("machd_block_files_total", {"outcome": "loaded"}, lambda now: now.loaded),
    ("machd_block_files_total", {"outcome": "damaged"}, lambda now: now.damaged),
    ("machd_block_files_total", {"outcome": "dropped"}, lambda now: now.dropped),
)


def watch_caches(metrics: Metrics, loop: EngineLoop, configuration: Configuration) -> None:
    """Point the metrics at the newest snapshot; without a cache, or a tier, they are 0."""

    def of_prefix(read: Callable[[PrefixReading], float]) -> Callable[[], float]:
        return lambda: float(read(loop.snapshot.prefix or _NO_PREFIX))

    def of_disk(read: Callable[[DiskReading], float]) -> Callable[[], float]:
        return lambda: float(read(loop.snapshot.memory.disk or _NO_DISK))

    for name, labels, prefix_read in _PREFIX:
        metrics.watch(name, of_prefix(prefix_read), **labels)
    for name, labels, disk_read in _DISK:
        metrics.watch(name, of_disk(disk_read), **labels)
    metrics.watch("machd_block_files_budget_bytes", lambda: _disk_budget_bytes(loop, configuration))


def _disk_budget_bytes(loop: EngineLoop, configuration: Configuration) -> float:
    if loop.snapshot.memory.disk is None:
        return 0.0
    return configuration.settings.cache.disk_budget_gb * _GB
