"""The KV budget: what was asked for, what the device allows, and how full it is."""

from __future__ import annotations

import pytest
from support.engines.fake_engine import FakeEngine

from machd.engine.protocol.memory import MemoryReading
from machd.link.kv_memory import KvMemory, asked_budget_bytes, effective_budget_bytes, kv_memory
from machd.link.snapshot import LoopSnapshot

GB = 1_000_000_000


@pytest.mark.parametrize(
    ("asked_gb", "device_bytes", "effective_bytes"),
    [
        (10.0, 100 * GB, 10 * GB),
        (10.0, 10 * GB, 6 * GB),
        (6.0, 10 * GB, 6 * GB),
        (0.0001, 10 * GB, 100_000),
        (10.0, 0, 10 * GB),
    ],
)
def test_a_budget_is_at_most_its_share_of_the_device(
    asked_gb: float, device_bytes: int, effective_bytes: int
) -> None:
    """What was asked for, or 60 % of what the device can hold; unknown devices take what is asked."""
    assert effective_budget_bytes(asked_gb, device_bytes) == effective_bytes
    assert asked_budget_bytes(asked_gb) >= effective_bytes


def test_a_batch_has_the_schedulers_budget() -> None:
    """Budget and reservations are the scheduler's, use is the engine's."""
    snapshot = LoopSnapshot(
        memory=MemoryReading(250, 0, 0, 0), kv_budget_bytes=1000, kv_reserved_bytes=500
    )
    memory = kv_memory(snapshot, FakeEngine().model)

    assert memory == KvMemory(1000, 500, 250)
    assert memory.usage_ratio == 0.25


def test_one_generation_at_a_time_can_fill_one_context() -> None:
    """Without a budget the bound is one sequence as long as the context."""
    memory = kv_memory(LoopSnapshot(), FakeEngine(context_tokens=64).model)

    assert memory == KvMemory(64 * 1024, 0, 0)
    assert memory.usage_ratio == 0.0
    assert KvMemory(0, 0, 0).usage_ratio == 0.0
