"""The probe of experts on disk passes a right bank and fails a faulty one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np
import pytest
from support.every_run import sampled

from machd.capabilities.evidence import Outcome
from machd.engine.experts.bank import ExpertBank
from machd.engine.experts.dtype_conversion import Bytes
from machd.engine.experts.stored_layer import StoredLayer
from machd.engine.experts.use_counts import Indices
from machd_probes.checks.expert_streaming import probe
from machd_probes.prober import tiny_subject
from machd_probes.subject import Subject


@pytest.fixture(scope="module")
def subject() -> Subject:
    """A model with two layers of four experts."""
    mx.disable_compile()
    return tiny_subject("qwen3_moe")


def test_probe_passes_a_right_bank(subject: Subject) -> None:
    """Banks for half of the experts and for one expert pass."""
    found = probe(subject)
    assert found.outcome is Outcome.PASSED
    assert found.evidence.cases > 20


def test_probe_does_not_apply_without_experts() -> None:
    """A llama has no switch layers, so the probe is unsupported."""
    assert probe(tiny_subject("llama")).outcome is Outcome.UNSUPPORTED


def _stale(bank: ExpertBank) -> None:
    """Read the expert before the requested one: a stale entry."""
    read = bank._read

    def stale(stored: StoredLayer, expert: int, into: Sequence[Bytes]) -> int:
        return read(stored, max(expert - 1, 0), into)

    bank._read = stale  # type: ignore[method-assign]


def _evicted_in_use(bank: ExpertBank) -> None:
    """Unpin and overwrite slots that the pass computes with."""
    request = bank.request

    def request_and_unpin(layer: int, experts: Indices) -> bool:
        have_slots = request(layer, experts)
        for pool in bank._distinct_pools:
            pool.is_pinned[:] = False
            last = pool.memory.slot_bytes(pool.memory.slots - 1)
            pool.memory.slot_bytes(0)[0][:] = last[0]
        return have_slots

    bank.request = request_and_unpin  # type: ignore[method-assign]


def _swapped(bank: ExpertBank) -> None:
    """Exchange the slots of experts whenever they are looked up."""
    slots = bank.slots

    def swapped(layer: int) -> Indices:
        return np.array(slots(layer)[::-1])

    bank.slots = swapped  # type: ignore[method-assign]


@pytest.mark.parametrize(
    "harm",
    # Two of the three compute with another expert's weights.
    sampled([_stale, _evicted_in_use, _swapped], [_stale, _evicted_in_use]),
)
def test_probe_fails_a_faulty_bank(subject: Subject, harm: Callable[[ExpertBank], None]) -> None:
    """A stale entry, an entry evicted in use, and two swapped experts are noticed."""
    assert probe(subject, harm).outcome is Outcome.FAILED
