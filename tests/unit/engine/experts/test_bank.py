"""The bank holds the right experts in bounded memory, and counts what it does."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from machd.engine.experts import bank as bank_module
from machd.engine.experts.bank import ExpertBank, Numbers
from machd.engine.experts.conversion import Bytes
from machd.engine.experts.expert_files import ExpertFiles, ExpertReadError
from machd.engine.experts.stored_layer import ParameterForm, Place, StoredLayer
from machd.errors import ModelMemoryError

_LAYERS, _EXPERTS, _WIDTH = 3, 8, 16
_FORM = ParameterForm("up_proj", "weight", (_WIDTH,), mx.float32, mx.float32)
_ENTRY_BYTES = _WIDTH * 4


class _Files(ExpertFiles):
    """Numbers that say which expert they are, with faults on demand."""

    def __init__(self) -> None:
        super().__init__([])
        self.lost: set[int] = set()
        self.stalled: set[int] = set()
        self.go_on = threading.Event()

    def read(self, place: Place, form: ParameterForm, into: Bytes) -> int:
        if place.offset in self.stalled:
            self.go_on.wait(timeout=10)
        if place.offset in self.lost:
            raise ExpertReadError("lost")
        into.view(np.float32)[:] = place.offset
        return form.stored_bytes


def _bank(slots: int) -> tuple[ExpertBank, _Files]:
    places = [
        tuple(Place(Path("none"), layer * _EXPERTS + expert) for expert in range(_EXPERTS))
        for layer in range(_LAYERS)
    ]
    layers = [StoredLayer(str(number), {_FORM: of_layer}) for number, of_layer in enumerate(places)]
    files = _Files()
    return ExpertBank(layers, files, capacity_bytes=slots * _ENTRY_BYTES), files


@pytest.fixture
def bank_and_files() -> Iterator[tuple[ExpertBank, _Files]]:
    """Room for half of the experts."""
    bank, files = _bank(_LAYERS * _EXPERTS // 2)
    yield bank, files
    files.go_on.set()
    bank.close()


def _numbers(*values: int) -> Numbers:
    return np.array(values, dtype=np.int64)


def _get(bank: ExpertBank, layer: int, experts: Numbers) -> list[int]:
    bank.free()
    bank.begin(layer, experts)
    return bank.finish(layer, experts)


def _content(bank: ExpertBank, layer: int, expert: int) -> float:
    array = bank.array(layer, "up_proj", "weight")
    assert array is not None
    return float(np.asarray(array)[bank.slots(layer)[expert], 0])


@settings(max_examples=60, deadline=None)
@given(
    slots=st.integers(1, _LAYERS * _EXPERTS),
    needs=st.lists(
        st.tuples(st.integers(0, _LAYERS - 1), st.sets(st.integers(0, _EXPERTS - 1), min_size=1)),
        max_size=25,
    ),
    ahead=st.lists(st.sets(st.integers(0, _EXPERTS - 1)), min_size=25, max_size=25),
)
def test_every_expert_that_is_held_is_itself(
    slots: int, needs: list[tuple[int, set[int]]], ahead: list[set[int]]
) -> None:
    """Whatever was needed and read ahead before, in whatever memory: slots hold whom the table names."""
    bank, _ = _bank(slots)
    for (layer, experts), guessed in zip(needs, ahead, strict=False):
        needed = _numbers(*sorted(experts))[: bank.room(layer)]
        bank.free()
        if bank.begin(layer, needed):
            bank.read_ahead((layer + 1) % _LAYERS, _numbers(*sorted(guessed)))
        assert bank.finish(layer, needed) == []
        for expert in needed.tolist():
            assert _content(bank, layer, expert) == layer * _EXPERTS + expert
        taken = [int(slot) for one in range(_LAYERS) for slot in bank.slots(one) if slot >= 0]
        assert len(taken) == len(set(taken)) <= slots
    reading = bank.reading()
    looked_up = sum(min(len(experts), bank.room(layer)) for layer, experts in needs[:25])
    assert reading.hits + reading.misses == looked_up
    assert reading.read_ahead_hits <= reading.misses
    bank.close()


def test_memory_is_taken_once_and_never_more(bank_and_files: tuple[ExpertBank, _Files]) -> None:
    """The capacity is that of the slots, which are all there from the start."""
    bank, _ = bank_and_files
    assert bank.capacity_bytes == _LAYERS * _EXPERTS // 2 * _ENTRY_BYTES
    bank.fill(lambda _: None)
    reading = bank.reading()
    assert reading.resident_bytes == reading.capacity_bytes == bank.capacity_bytes
    assert reading.entries == _LAYERS * _EXPERTS // 2
    assert [int(np.count_nonzero(bank.slots(layer) >= 0)) for layer in range(_LAYERS)] == [4, 4, 4]


def test_what_is_needed_often_stays(bank_and_files: tuple[ExpertBank, _Files]) -> None:
    """Experts needed once make room, one after the other, and those needed every pass stay."""
    bank, _ = bank_and_files
    for number in range(30):
        for layer in range(_LAYERS):
            assert _get(bank, layer, _numbers(0, 1, 2 + number % 6)) == []
    before = bank.reading().misses
    for layer in range(_LAYERS):
        _get(bank, layer, _numbers(0, 1))
    assert bank.reading().misses == before


def test_an_expert_in_use_never_makes_room() -> None:
    """Reading ahead finds no slot while all are held, and takes none."""
    bank, _ = _bank(4)
    bank.free()
    needed = _numbers(0, 1, 2, 3)
    bank.begin(0, needed)
    bank.read_ahead(1, _numbers(0, 1, 2, 3))
    assert bank.finish(0, needed) == []
    assert [_content(bank, 0, expert) for expert in range(4)] == [0, 1, 2, 3]
    assert bank.reading().evictions == 0
    bank.close()


def test_an_expert_that_cannot_be_read_fails_alone(
    bank_and_files: tuple[ExpertBank, _Files],
) -> None:
    """Others are there, and it is tried again when it is needed again."""
    bank, files = bank_and_files
    files.lost.add(1)
    assert _get(bank, 0, _numbers(0, 1, 2)) == [1]
    assert bank.slots(0)[1] < 0
    assert _content(bank, 0, 2) == 2
    files.lost.clear()
    assert _get(bank, 0, _numbers(0, 1, 2)) == []
    assert _content(bank, 0, 1) == 1


def test_a_stalled_disk_fails_what_waits_for_it(
    bank_and_files: tuple[ExpertBank, _Files], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wait has an end, the slot is lost to nobody, and a later read that arrives counts."""
    bank, files = bank_and_files
    monkeypatch.setattr(bank_module, "READ_LIMIT_S", 0.05)
    files.stalled.add(1)
    assert _get(bank, 0, _numbers(0, 1)) == [1]
    files.go_on.set()
    monkeypatch.setattr(bank_module, "READ_LIMIT_S", 10.0)
    assert _get(bank, 0, _numbers(0, 1)) == []
    assert _content(bank, 0, 1) == 1


def test_what_was_read_ahead_is_a_miss_found_in_time(
    bank_and_files: tuple[ExpertBank, _Files],
) -> None:
    """Hits were there before anybody guessed."""
    bank, _ = bank_and_files
    bank.read_ahead(0, _numbers(5))
    _get(bank, 0, _numbers(5, 6))
    reading = bank.reading()
    assert (reading.hits, reading.misses, reading.read_ahead_hits) == (0, 2, 1)
    _get(bank, 0, _numbers(5, 6))
    assert bank.reading().hits == 2


def test_a_layer_that_is_in_memory_has_a_table_until_one_of_it_leaves() -> None:
    """The table is that of the slots as they are."""
    bank, _ = _bank(_EXPERTS)
    everyone = np.arange(_EXPERTS)
    assert bank.table(0) is None
    _get(bank, 0, everyone)
    table = bank.table(0)
    assert table is not None
    assert table.tolist() == bank.slots(0).tolist()
    _get(bank, 1, _numbers(0))
    assert bank.table(0) is None
    bank.close()


def test_a_bank_without_room_for_one_expert_is_refused() -> None:
    """The message says what one takes."""
    with pytest.raises(ModelMemoryError, match=r"experts\.resident_gb"):
        _bank(0)
