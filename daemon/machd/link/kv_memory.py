"""KV memory: the budget, reserved and allocated bytes, and the memory of the prefix cache."""

from __future__ import annotations

from msgspec import Struct

from machd.engine.protocol.engine import ModelDescription
from machd.link.snapshot import LoopSnapshot

DEVICE_SHARE = 0.6
"""Largest share of the device's memory for a KV budget."""

_GB = 1_000_000_000


class KvMemory(Struct, frozen=True):
    """The KV budget of running sequences, with its reserved and its allocated bytes.

    The blocks of the prefix cache are not included: they are in ``prefix.bytes``, each counted once
    however many sequences begin with it.
    """

    budget_bytes: int
    reserved_bytes: int
    used_bytes: int

    @property
    def usage_ratio(self) -> float:
        """Used share of the budget, from 0 to 1, or a little more while columns of rows that left are kept."""
        return self.used_bytes / self.budget_bytes if self.budget_bytes else 0.0


def asked_budget_bytes(asked_gb: float) -> int:
    """``continuous_batching.kv_budget_gb`` in bytes."""
    return round(asked_gb * _GB)


def effective_budget_bytes(asked_gb: float, device_memory_bytes: int) -> int:
    """Return the budget asked for, but at most the device's share.

    ``device_memory_bytes`` is 0 where that is not known.
    """
    asked_bytes = asked_budget_bytes(asked_gb)
    if not device_memory_bytes:
        return asked_bytes
    return min(asked_bytes, int(device_memory_bytes * DEVICE_SHARE))


def kv_memory(snapshot: LoopSnapshot, model: ModelDescription) -> KvMemory:
    """Return the KV cache's part of a snapshot.

    Single flight needs no budget: the cache holds at most one sequence of the context's length, and nothing
    is reserved.
    """
    budget_bytes = snapshot.kv_budget_bytes
    if budget_bytes is None:
        cache = model.cache
        budget_bytes = model.context_tokens * cache.bytes_per_token + cache.bytes_per_sequence
    return KvMemory(budget_bytes, snapshot.kv_reserved_bytes, snapshot.memory.kv_used_bytes)
