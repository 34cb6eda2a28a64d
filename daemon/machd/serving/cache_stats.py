"""What the caches hold, read from the engine thread's snapshots."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime

from machd.engine.protocol.engine import DiskReading, ModelDescription
from machd.scheduler.events import DecodeMode
from machd.serving.cache_stats_wire import CacheStats, DiskStats, KvStats, PrefixStats
from machd.serving.kv_memory import kv_memory
from machd.serving.loop import EngineLoop
from machd.settings.model import Settings

_GB = 1_000_000_000


def cache_stats(loop: EngineLoop, model: ModelDescription, settings: Settings) -> CacheStats:
    """The caches now, or at the last idle moment while a single generation runs.

    Args:
        loop: Has the snapshots.
        model: That is loaded.
        settings: In force.
    """
    is_live = loop.snapshot.mode is DecodeMode.BATCHED
    is_stale = not is_live and loop.snapshot.active_loops > 0
    snapshot = loop.snapshot if is_live else loop.idle_snapshot
    kv = kv_memory(snapshot, model)
    disk = snapshot.memory.disk
    return CacheStats(
        status="stale_generation_in_flight" if is_stale else "ok",
        as_of=datetime.fromtimestamp(snapshot.taken_unix_s, UTC).isoformat(timespec="milliseconds"),
        kv=KvStats(
            budget_bytes=kv.budget_bytes,
            reserved_bytes=kv.reserved_bytes,
            used_bytes=kv.used_bytes,
        ),
        prefix=None if snapshot.prefix is None else PrefixStats(**asdict(snapshot.prefix)),
        disk=None if disk is None else _disk_stats(disk, settings.cache.disk_budget_gb),
    )


def _disk_stats(reading: DiskReading, budget_gb: float) -> DiskStats:
    return DiskStats(**asdict(reading), budget_bytes=round(budget_gb * _GB))
