"""Slots: occupied, free, and still to free by the engine."""

from __future__ import annotations

import pytest
from support.schedulers.sequence_samples import sequence_of

from machd.engine.protocol.step import Lane
from machd.scheduler.slots import Slots


def _occupied(slots: Slots, *sequence_ids: str) -> None:
    for sequence_id in sequence_ids:
        slots.occupy(sequence_of(sequence_id), Lane.BATCH, now_s=1.0)


def test_the_lowest_free_slot_is_given_out_first() -> None:
    """Rows stay at the front of the batch: a hole is filled before the end grows."""
    slots = Slots(3)
    _occupied(slots, "a", "b", "c")
    slots.leave(1)
    slots.leave(0)

    assert slots.occupy(sequence_of("d"), Lane.BATCH, now_s=1.0) == 0
    assert slots.occupy(sequence_of("e"), Lane.BATCH, now_s=1.0) == 1
    assert [sequence.request.sequence_id for sequence in slots] == ["d", "e", "c"]


def test_a_seated_decode_runs_and_knows_its_slot() -> None:
    """Taking a slot is what admits a sequence."""
    slots = Slots(2)
    sequence = sequence_of()

    assert slots.occupy(sequence, Lane.BATCH, now_s=3.0) == 0
    assert (sequence.slot_index, sequence.lane, sequence.admitted_s) == (0, Lane.BATCH, 3.0)
    assert slots.at(0) is sequence
    assert (len(slots), slots.free_count, slots.count) == (1, 1, 2)


def test_absent_sequence_is_not_found() -> None:
    """Empty and unknown slots are answers, not errors."""
    slots = Slots(1)
    assert slots.at(0) is None
    assert slots.at(7) is None


def test_no_more_sequences_than_slots() -> None:
    """Admission without a free slot is a programmer error and changes nothing."""
    slots = Slots(1)
    _occupied(slots, "a")
    late = sequence_of("b")

    with pytest.raises(AssertionError, match="no slot is free"):
        slots.occupy(late, Lane.BATCH, now_s=1.0)
    assert not late.is_running


def test_a_left_slot_stays_released_until_the_engine_confirms() -> None:
    """Releases are remembered over as many plans as it takes, and confirmed one by one."""
    slots = Slots(3)
    _occupied(slots, "a", "b", "c")
    slots.leave(2)
    slots.leave(0)

    seen = [slots.released]
    for confirmed in [(0,), (0, 1, 2)]:
        slots.confirm_released(confirmed)
        seen.append(slots.released)
    assert seen == [(0, 2), (2,), ()]


def test_a_slot_can_be_taken_again_before_its_release_is_confirmed() -> None:
    """The engine frees before it prefills, so one plan may do both; the release is not lost."""
    slots = Slots(1)
    _occupied(slots, "a")
    slots.leave(0)
    _occupied(slots, "b")

    assert slots.released == (0,)
    assert len(slots) == 1
    slots.confirm_released((0,))
    assert slots.at(0) is not None


def test_an_empty_batch_is_no_batch() -> None:
    """A scheduler without a slot could never answer."""
    with pytest.raises(AssertionError, match="at least one slot"):
        Slots(0)
