"""The document of ``GET /v1/cache/stats``."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Literal

from msgspec import Meta, Struct
from msgspec.structs import asdict

from machd.engine.protocol.memory import DiskReading, ExpertReading, MediaReading
from machd.link.kv_memory import KvMemory, kv_memory
from machd.scheduler.events import DecodeMode
from machd.scheduler.prefix_limits import PrefixReading
from machd.served.served_model import ServedModel
from machd.served.vector_cache import VectorReading
from machd.settings.model import Settings


class DiskStats(DiskReading, frozen=True, kw_only=True):
    """The disk tier with its budget.

    Attributes:
        budget_bytes: Limit of its files.
    """

    budget_bytes: int


class ExpertBankStats(ExpertReading, frozen=True, kw_only=True):
    """The bank of experts in memory with its rate of hits.

    Attributes:
        hit_rate: Share of hits among the lookups; null before any.
    """

    hit_rate: float | None


class CacheStats(Struct, frozen=True, kw_only=True):
    """The caches at one moment.

    Attributes:
        status: ``stale_generation_in_flight`` in single-flight mode while a generation runs:
            the numbers are those of the last idle moment.
        as_of: When the numbers were read (RFC 3339).
        prefix: Null where there is no prefix cache.
        disk: The disk tier; null where there is none.
        expert_bank: Experts on disk; null where the whole model is in memory.
        encoder: Embeddings of images and videos; null for a model that takes text only.
        vectors: Vectors, scores and classes of earlier texts; null for a model that generates.
    """

    status: Literal["ok", "stale_generation_in_flight"]
    as_of: Annotated[str, Meta(extra_json_schema={"format": "date-time"})]
    kv: KvMemory
    prefix: PrefixReading | None = None
    disk: DiskStats | None = None
    expert_bank: ExpertBankStats | None = None
    encoder: MediaReading | None = None
    vectors: VectorReading | None = None


_GB = 1_000_000_000


def cache_stats(served: ServedModel, settings: Settings) -> CacheStats:
    """The caches now, or at the last idle moment while a single generation runs."""
    is_live = served.snapshot.mode is DecodeMode.BATCHED
    is_stale = not is_live and served.snapshot.active_loops > 0
    snapshot = served.snapshot if is_live else served.idle_snapshot
    disk, experts, media = snapshot.memory.disk, snapshot.memory.experts, snapshot.memory.media
    return CacheStats(
        status="stale_generation_in_flight" if is_stale else "ok",
        as_of=datetime.fromtimestamp(snapshot.taken_unix_s, UTC).isoformat(timespec="milliseconds"),
        kv=kv_memory(snapshot, served.model),
        prefix=snapshot.prefix,
        disk=None if disk is None else _disk_stats(disk, settings.cache.disk_budget_gb),
        expert_bank=None if experts is None else _expert_stats(experts),
        encoder=media,
        vectors=None if served.encoder is None else served.kept_vectors().reading,
    )


def _expert_stats(reading: ExpertReading) -> ExpertBankStats:
    looked_up = reading.hits + reading.misses
    hit_rate = reading.hits / looked_up if looked_up else None
    return ExpertBankStats(**asdict(reading), hit_rate=hit_rate)


def _disk_stats(reading: DiskReading, budget_gb: float) -> DiskStats:
    return DiskStats(**asdict(reading), budget_bytes=round(budget_gb * _GB))
