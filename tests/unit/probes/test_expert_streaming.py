"""The check of experts on disk passes what is right and notices what is not."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest

from machd.capabilities.evidence import Outcome
from machd.engine.experts.bank import ExpertBank, Numbers
from machd_probes.checks.expert_streaming import probe
from machd_probes.prober import tiny_subject
from machd_probes.subject import Subject


@pytest.fixture(scope="module")
def subject() -> Subject:
    """Two layers of four experts."""
    mx.disable_compile()
    return tiny_subject("qwen3_moe")


def test_right_experts_pass(subject: Subject) -> None:
    """With half of them in memory, and with room for one."""
    found = probe(subject)
    assert found.outcome is Outcome.PASSED
    assert found.evidence.cases > 20


def test_a_model_without_experts_has_nothing_to_check() -> None:
    """A llama."""
    assert probe(tiny_subject("llama")).outcome is Outcome.UNSUPPORTED


def _stale(bank: ExpertBank) -> None:
    """An expert that arrives is written over by the one before it in the file."""
    read = bank._read

    def stale(stored: object, expert: int, room: object) -> int:
        return read(stored, max(expert - 1, 0), room)  # type: ignore[arg-type]

    bank._read = stale  # type: ignore[method-assign]


def _evicted_in_use(bank: ExpertBank) -> None:
    """Nothing is held: what a step computes with makes room for what it reads ahead."""
    begin = bank.begin

    def begin_and_let_go(layer: int, experts: Numbers) -> bool:
        has_room = begin(layer, experts)
        for shelf in bank._shelves:
            shelf.is_held[:] = False
            shelf.slab.room(0)[0][:] = shelf.slab.room(shelf.slab.slots - 1)[0]
        return has_room

    bank.begin = begin_and_let_go  # type: ignore[method-assign]


def _swapped(bank: ExpertBank) -> None:
    """Two experts are taken for each other."""
    slots = bank.slots

    def swapped(layer: int) -> Numbers:
        return np.array(slots(layer)[::-1])

    bank.slots = swapped  # type: ignore[method-assign]


@pytest.mark.parametrize("harm", [_stale, _evicted_in_use, _swapped])
def test_a_wrong_expert_fails(subject: Subject, harm: Callable[[ExpertBank], None]) -> None:
    """A stale entry, one that made room while it was in use, two that were swapped."""
    assert probe(subject, harm).outcome is Outcome.FAILED
