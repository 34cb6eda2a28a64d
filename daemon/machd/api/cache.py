"""What ``GET /v1/cache/stats`` answers."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

__all__ = ["CacheStats", "KvStats", "PrefixStats"]


class KvStats(Struct, frozen=True, kw_only=True):
    """The KV budget, what is promised out of it, and what lies there."""

    budget_bytes: int
    reserved_bytes: int
    used_bytes: int


class PrefixStats(Struct, frozen=True, kw_only=True):
    """The prefix cache: counts since the start, and what it holds now.

    Attributes:
        hits: Queries that found a whole prompt.
        prefix_hits: Queries that found the beginning of a prompt.
        shared_blocks: Blocks that more than one entry refers to.
        bytes_saved: What those blocks would take if nothing were shared.
    """

    queries: int
    hits: int
    prefix_hits: int
    misses: int
    entries: int
    blocks: int
    shared_blocks: int
    bytes: int
    bytes_saved: int
    evictions: int


class CacheStats(Struct, frozen=True, kw_only=True):
    """The caches at one moment.

    Attributes:
        status: ``stale_generation_in_flight`` in single-flight mode while a generation runs:
            the numbers are those of the last idle moment.
        as_of: When the numbers were read (RFC 3339).
        prefix: Null while there is no prefix cache.
        disk: The second tier; null while there is none.
        expert_bank: Resident experts of a streamed model; null while there is none.
    """

    status: Literal["ok", "stale_generation_in_flight"]
    as_of: Annotated[str, Meta(extra_json_schema={"format": "date-time"})]
    kv: KvStats
    prefix: PrefixStats | None = None
    disk: None = None
    expert_bank: None = None
