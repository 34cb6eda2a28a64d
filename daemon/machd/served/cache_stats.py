"""The document of ``GET /v1/cache/stats``."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime
from typing import Annotated, Literal

from msgspec import Meta, Struct

from machd.engine.protocol.engine import DiskReading, ExpertReading
from machd.link.kv_memory import kv_memory
from machd.scheduler.events import DecodeMode
from machd.served.served_model import ServedModel
from machd.settings.model import Settings


class KvStats(Struct, frozen=True, kw_only=True):
    """The KV budget of running sequences, what is promised out of it, and what lies there.

    The blocks of the prefix cache are not in it: those are in ``prefix.bytes``, each once however
    many sequences begin with it.
    """

    budget_bytes: int
    reserved_bytes: int
    used_bytes: int


class PrefixStats(Struct, frozen=True, kw_only=True):
    """The prefix cache: counts since the start, and what it holds now.

    Attributes:
        queries: Prompts that were looked up; each is a hit, a prefix hit or a miss.
        hits: Queries that found a whole prompt, but for its last token.
        prefix_hits: Queries that found the beginning of a prompt.
        entries: Texts that are kept.
        blocks: Blocks in memory.
        shared_blocks: Blocks that more than one entry begins with.
        pinned_blocks: Blocks that running sequences began with, which stay.
        bytes: What the blocks take in memory, each counted once.
        pinned_bytes: What the pinned ones take.
        bytes_saved: What would be taken besides if nothing were shared.
        limit_bytes: What the blocks may take now; null where only their number is limited.
        evictions: Blocks that made room for others.
        saved_blocks: Blocks in the disk tier.
        saved_bytes: What those would take in memory.
    """

    queries: int
    hits: int
    prefix_hits: int
    misses: int
    entries: int
    blocks: int
    shared_blocks: int
    pinned_blocks: int
    bytes: int
    pinned_bytes: int
    bytes_saved: int
    limit_bytes: int | None
    evictions: int
    saved_blocks: int
    saved_bytes: int


class DiskStats(Struct, frozen=True, kw_only=True):
    """The disk tier; counts are since the start.

    Attributes:
        bytes: What its files take.
        budget_bytes: What they may take.
        written: Blocks that were written.
        loaded: Blocks that were read back.
        damaged: Files that were not what they should be, and were deleted.
        dropped: Blocks that were not written, because writing could not keep up or failed.
    """

    bytes: int
    budget_bytes: int
    written: int
    loaded: int
    damaged: int
    dropped: int


class ExpertBankStats(Struct, frozen=True, kw_only=True):
    """The bank of experts in memory; counts are since the start.

    A layer looks each expert up once a pass, however many tokens need it. A layer that is in memory whole
    looks nothing up.

    Attributes:
        capacity_bytes: Memory of the bank, full or not.
        resident_bytes: Memory of the experts in it.
        entries: Experts in it, counted for each layer.
        hits: Lookups of experts that were in memory.
        misses: Lookups of experts that were not, when the layer before was computed.
        evictions: Experts that were evicted for others.
        hit_rate: Share of hits among the lookups; null before any.
        bytes_read: Bytes read from the model's files.
        read_ahead_hits: Misses that read-ahead had read, or was reading, when they were needed.
    """

    capacity_bytes: int
    resident_bytes: int
    entries: int
    hits: int
    misses: int
    evictions: int
    hit_rate: float | None
    bytes_read: int
    read_ahead_hits: int


class EncoderCacheStats(Struct, frozen=True, kw_only=True):
    """Embeddings of images and videos; counts are since the start.

    Attributes:
        entries: Images and videos whose embeddings are kept.
        bytes: Memory of these.
        hits: Look-ups of embeddings that were there.
        misses: Images and videos that were encoded.
        encoding_s: Time that encoding took, in which no other sequence moves.
    """

    entries: int
    bytes: int
    hits: int
    misses: int
    encoding_s: float


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
    """

    status: Literal["ok", "stale_generation_in_flight"]
    as_of: Annotated[str, Meta(extra_json_schema={"format": "date-time"})]
    kv: KvStats
    prefix: PrefixStats | None = None
    disk: DiskStats | None = None
    expert_bank: ExpertBankStats | None = None
    encoder: EncoderCacheStats | None = None


_GB = 1_000_000_000


def cache_stats(served: ServedModel, settings: Settings) -> CacheStats:
    """The caches now, or at the last idle moment while a single generation runs.

    Args:
        served: The model, which is loaded.
        settings: In force.
    """
    is_live = served.snapshot.mode is DecodeMode.BATCHED
    is_stale = not is_live and served.snapshot.active_loops > 0
    snapshot = served.snapshot if is_live else served.idle_snapshot
    kv = kv_memory(snapshot, served.model)
    disk, experts, media = snapshot.memory.disk, snapshot.memory.experts, snapshot.memory.media
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
        expert_bank=None if experts is None else _expert_stats(experts),
        encoder=None if media is None else EncoderCacheStats(**asdict(media)),
    )


def _expert_stats(reading: ExpertReading) -> ExpertBankStats:
    looked_up = reading.hits + reading.misses
    hit_rate = reading.hits / looked_up if looked_up else None
    return ExpertBankStats(**asdict(reading), hit_rate=hit_rate)


def _disk_stats(reading: DiskReading, budget_gb: float) -> DiskStats:
    return DiskStats(**asdict(reading), budget_bytes=round(budget_gb * _GB))
