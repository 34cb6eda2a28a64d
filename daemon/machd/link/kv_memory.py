"""Bytes of KV cache that may be taken, are promised and are there; and what the prefix cache may keep."""

from __future__ import annotations

from msgspec import Struct

from machd.engine.protocol.engine import ModelDescription
from machd.link.snapshot import LoopSnapshot

DEVICE_SHARE = 0.6
"""Of what the device can hold, the most that a KV budget may be."""

_GB = 1_000_000_000


class KvMemory(Struct, frozen=True):
    """The KV budget of running sequences, what is promised out of it, and what lies there.

    The blocks of the prefix cache are not in it: those are in ``prefix.bytes``, each once however
    many sequences begin with it.
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

    ``device_memory_bytes`` is 0 where that is not known.
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
