"""Bytes of KV cache that may be taken, are promised and are there; and what the prefix cache may keep."""

from __future__ import annotations

from dataclasses import dataclass

from machd.engine.protocol.engine import ModelDescription
from machd.engine_process.loop_snapshot import LoopSnapshot
from machd.scheduler.prefix_cache import PrefixConfig
from machd.scheduler.prefix_limits import BlockCosts, PrefixLimits
from machd.settings.cache import CacheSettings

DEVICE_SHARE = 0.6
"""Of what the device can hold, the most that a KV budget may be."""

_GB = 1_000_000_000


@dataclass(frozen=True, slots=True)
class KvMemory:
    """The KV cache at the moment of a snapshot.

    Attributes:
        budget_bytes: What running sequences may take together.
        reserved_bytes: What they were promised.
        used_bytes: What they hold.
    """

    budget_bytes: int
    reserved_bytes: int
    used_bytes: int

    @property
    def usage_ratio(self) -> float:
        """Used of the budget: from 0 to 1, or a little more while room of rows that left is kept."""
        return self.used_bytes / self.budget_bytes if self.budget_bytes else 0.0


def asked_budget_bytes(asked_gb: float) -> int:
    """``continuous_batching.kv_budget_gb`` in bytes."""
    return round(asked_gb * _GB)


def effective_budget_bytes(asked_gb: float, device_memory_bytes: int) -> int:
    """The budget asked for, but never more than the device's share of it.

    Args:
        asked_gb: ``continuous_batching.kv_budget_gb``.
        device_memory_bytes: What the device can hold; 0 where that is not known.
    """
    asked_bytes = asked_budget_bytes(asked_gb)
    if not device_memory_bytes:
        return asked_bytes
    return min(asked_bytes, int(device_memory_bytes * DEVICE_SHARE))


def kv_memory(snapshot: LoopSnapshot, model: ModelDescription) -> KvMemory:
    """Return the KV cache's part of a snapshot.

    One generation at a time needs no budget: the most that can lie in the cache is one sequence as
    long as the context, and nothing is reserved.
    """
    budget_bytes = snapshot.kv_budget_bytes
    if budget_bytes is None:
        cache = model.cache
        budget_bytes = model.context_tokens * cache.bytes_per_token + cache.bytes_per_sequence
    return KvMemory(budget_bytes, snapshot.kv_reserved_bytes, snapshot.memory.kv_used_bytes)


_MB, _GB = 1_000_000, 1_000_000_000

_LEFT_SHARE = 0.05
_MAX_LEFT_BYTES = _GB
"""Of what the machine had when the model was loaded so much is to be left to others, whatever happens;
the cache gives way."""


def prefix_shape(section: CacheSettings, model: ModelDescription) -> PrefixConfig:
    """Return the shape of a model's prefix cache."""
    facts = model.cache
    state_bytes = 0
    if not facts.has_positions_only:
        # A window is counted whole; what it really takes is known once it was kept.
        window_bytes = max(facts.window_tokens, default=0) * facts.bytes_per_token
        state_bytes = max(facts.bytes_per_sequence + window_bytes, 1)
    costs = BlockCosts(facts.bytes_per_token, state_bytes)
    return PrefixConfig(model.block_key, section.block_tokens, costs)


def prefix_limits(section: CacheSettings, available_bytes: int | None) -> PrefixLimits:
    """Return the limits of the prefix cache's blocks.

    Args:
        section: The settings.
        available_bytes: What the machine had left with the model loaded; where that is not known, only
            ``cache.memory_mb`` can say it.
    """
    known_bytes = available_bytes or 0
    max_bytes = int(known_bytes * section.memory_percent)
    if section.memory_mb is not None:
        max_bytes = section.memory_mb * _MB
    return PrefixLimits(
        max_bytes=max_bytes,
        max_entries=section.max_entries,
        left_bytes=min(int(known_bytes * _LEFT_SHARE), _MAX_LEFT_BYTES),
        disk_bytes=round(section.disk_budget_gb * _GB) if section.disk_dir else None,
    )
