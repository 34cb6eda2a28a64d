"""Memory of an engine: what it tells of it, and the error of a step that does not fit."""

from __future__ import annotations

from dataclasses import dataclass

from msgspec import Struct


class StepMemoryError(Exception):
    """A step needs more memory than is left for it.

    Attributes:
        needed_bytes: Upper estimate of the step's peak.
        left_bytes: Bytes that steps may take at that moment.
    """

    def __init__(self, *, needed_bytes: int, left_bytes: int) -> None:
        """Keep the numbers for the log and for the scheduler."""
        super().__init__(f"a step needs {needed_bytes} bytes and {left_bytes} are left for it")
        self.needed_bytes = needed_bytes
        self.left_bytes = left_bytes


class DiskReading(Struct, frozen=True):
    """The disk tier of blocks at one moment; counts are since the start.

    Attributes:
        bytes: What its files take.
        written: Blocks that were written.
        loaded: Blocks that were read back.
        damaged: Files that were not what they should be, and were deleted.
        dropped: Blocks that were not written because writing could not keep up or failed.
    """

    bytes: int = 0
    written: int = 0
    loaded: int = 0
    damaged: int = 0
    dropped: int = 0


class ExpertReading(Struct, frozen=True):
    """The expert bank at one moment; counts are since the start.

    A layer looks each expert up once a pass, however many tokens need it. A layer that is in memory whole
    looks nothing up.

    Attributes:
        capacity_bytes: Memory of the bank, full or not.
        resident_bytes: Memory of the experts in it.
        entries: Experts in it, counted for each layer.
        hits: Lookups of experts that were in memory when the layer before was computed.
        misses: Lookups of experts that were not.
        evictions: Experts that were evicted for others.
        bytes_read: Bytes read from the model's files.
        read_ahead_hits: Misses that read-ahead had read, or was reading, when they were needed.
    """

    capacity_bytes: int = 0
    resident_bytes: int = 0
    entries: int = 0
    hits: int = 0
    misses: int = 0
    evictions: int = 0
    bytes_read: int = 0
    read_ahead_hits: int = 0


class AdapterReading(Struct, frozen=True):
    """Adapters in memory at one moment.

    Attributes:
        loaded: Number of them; several that a row is computed with count as one.
        held: Of those, with rows.
        loading: On their way.
        used_bytes: What they take.
        loads: Those that came into memory since the start.
    """

    loaded: int = 0
    held: int = 0
    loading: int = 0
    used_bytes: int = 0
    loads: int = 0


class MediaReading(Struct, frozen=True):
    """The encoder's cache at one moment; counts are since the start.

    Attributes:
        entries: Images and videos whose embeddings are kept.
        bytes: Memory of these.
        hits: Look-ups of embeddings that were there.
        misses: Images and videos that were encoded.
        encoding_s: Time that encoding took, in which no other row moves.
    """

    entries: int = 0
    bytes: int = 0
    hits: int = 0
    misses: int = 0
    encoding_s: float = 0.0


@dataclass(frozen=True, slots=True)
class RankReading:
    """The memory of one rank at one moment.

    Attributes:
        active_bytes: Held by the array library, weights included.
        available_bytes: What the process can still take.
        heard_unix_s: When the rank last took part in a step or said this.
    """

    rank: int
    active_bytes: int
    available_bytes: int
    heard_unix_s: float


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """Bytes at one moment.

    Attributes:
        kv_used_bytes: KV and state held for occupied slots.
        active_bytes: Held by the array library, weights included.
        peak_bytes: The most ``active_bytes`` has been.
        cache_bytes: Kept by the array library for reuse.
        available_bytes: What the process can still take; None where that is unknown.
        step_bytes: The part of it that steps may take; the rest is for everything else that the
            process does. None where that is unknown.
        disk: The disk tier of blocks; None without one.
        experts: The bank of experts; None where all are in memory.
        media: The encoder's cache; None for a model without vision.
        adapters: Adapters in memory; None for an engine without.
        ranks: Every rank of the model; none where this process computes it alone.
        is_stale: Whether the memory could not be read, so that these are older bytes.
    """

    kv_used_bytes: int
    active_bytes: int
    peak_bytes: int
    cache_bytes: int
    available_bytes: int | None = None
    step_bytes: int | None = None
    disk: DiskReading | None = None
    experts: ExpertReading | None = None
    media: MediaReading | None = None
    adapters: AdapterReading | None = None
    ranks: tuple[RankReading, ...] = ()
    is_stale: bool = False
