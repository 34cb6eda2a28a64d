"""The bank holds the requested experts in bounded memory, and counts lookups, evictions and reads."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.clocks.polling import CEILING_S

from machd.engine.experts import bank as bank_module
from machd.engine.experts.bank import ExpertBank
from machd.engine.experts.dtype_conversion import Bytes
from machd.engine.experts.expert_files import ExpertFiles, ExpertReadError
from machd.engine.experts.stored_layer import ExpertParameter, Location, StoredLayer
from machd.engine.experts.use_counts import Indices
from machd.errors import ModelMemoryError

_LAYERS, _EXPERTS, _WIDTH = 3, 8, 16
_PARAMETER = ExpertParameter("up_proj", "weight", (_WIDTH,), mx.float32, mx.float32)
_ENTRY_BYTES = _WIDTH * 4


class _Files(ExpertFiles):
    """Experts whose values are ``layer * _EXPERTS + expert``, with faults on demand."""

    def __init__(self) -> None:
        super().__init__([])
        self.lost: set[int] = set()
        self.stalled: set[int] = set()
        self.resume = threading.Event()
        self.reads: list[int] = []

    def read(self, location: Location, parameter: ExpertParameter, into: Bytes) -> int:
        self.reads.append(location.offset)
        if location.offset in self.stalled:
            self.resume.wait(timeout=CEILING_S)
        if location.offset in self.lost:
            raise ExpertReadError("lost")
        into.view(np.float32)[:] = location.offset
        return parameter.stored_bytes


def _bank(slots: int) -> tuple[ExpertBank, _Files]:
    locations = [
        tuple(Location(Path("none"), layer * _EXPERTS + expert) for expert in range(_EXPERTS))
        for layer in range(_LAYERS)
    ]
    layers = [StoredLayer(str(number), {_PARAMETER: one}) for number, one in enumerate(locations)]
    files = _Files()
    return ExpertBank(layers, files, capacity_bytes=slots * _ENTRY_BYTES), files


@pytest.fixture
def bank_and_files() -> Iterator[tuple[ExpertBank, _Files]]:
    """A bank for half of the experts."""
    bank, files = _bank(_LAYERS * _EXPERTS // 2)
    yield bank, files
    files.resume.set()
    bank.close()


def _indices(*values: int) -> Indices:
    return np.array(values, dtype=np.int64)


def _get(bank: ExpertBank, layer: int, experts: Indices) -> list[int]:
    bank.unpin_all()
    bank.count_uses(layer, experts, np.ones_like(experts))
    bank.request(layer, experts)
    return bank.wait(layer, experts)


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
def test_bank_slots_hold_the_requested_experts_after_any_history(
    slots: int, needs: list[tuple[int, set[int]]], ahead: list[set[int]]
) -> None:
    """After any requests and read-ahead, in any capacity, each requested expert's slot holds its values."""
    bank, _ = _bank(slots)
    for (layer, experts), previewed in zip(needs, ahead, strict=False):
        needed = _indices(*sorted(experts))[: bank.max_experts(layer)]
        bank.unpin_all()
        if bank.request(layer, needed):
            bank.read_ahead((layer + 1) % _LAYERS, _indices(*sorted(previewed)))
        assert bank.wait(layer, needed) == []
        for expert in needed.tolist():
            assert _content(bank, layer, expert) == layer * _EXPERTS + expert
        taken = [int(slot) for one in range(_LAYERS) for slot in bank.slots(one) if slot >= 0]
        assert len(taken) == len(set(taken)) <= slots
    reading = bank.reading()
    lookups = sum(min(len(experts), bank.max_experts(layer)) for layer, experts in needs[:25])
    assert reading.hits + reading.misses == lookups
    assert reading.read_ahead_hits <= reading.misses
    bank.close()


def test_bank_memory_is_its_capacity_when_filled(
    bank_and_files: tuple[ExpertBank, _Files],
) -> None:
    """Filling allocates nothing beyond the capacity, and gives each layer the same number of experts."""
    bank, _ = bank_and_files
    assert bank.capacity_bytes == _LAYERS * _EXPERTS // 2 * _ENTRY_BYTES
    bank.fill(lambda _: None)
    reading = bank.reading()
    assert reading.resident_bytes == reading.capacity_bytes == bank.capacity_bytes
    assert reading.entries == _LAYERS * _EXPERTS // 2
    assert [int(np.count_nonzero(bank.slots(layer) >= 0)) for layer in range(_LAYERS)] == [4, 4, 4]


def test_bank_keeps_experts_that_every_pass_uses(bank_and_files: tuple[ExpertBank, _Files]) -> None:
    """Experts of every pass stay resident while experts of single passes evict each other."""
    bank, _ = bank_and_files
    for number in range(30):
        for layer in range(_LAYERS):
            assert _get(bank, layer, _indices(0, 1, 2 + number % 6)) == []
    before = bank.reading().misses
    for layer in range(_LAYERS):
        _get(bank, layer, _indices(0, 1))
    assert bank.reading().misses == before


def test_read_ahead_evicts_no_pinned_expert() -> None:
    """Read-ahead reads nothing when every slot is pinned."""
    bank, files = _bank(4)
    bank.unpin_all()
    needed = _indices(0, 1, 2, 3)
    bank.request(0, needed)
    bank.read_ahead(1, _indices(0, 1, 2, 3))
    assert bank.wait(0, needed) == []
    assert [_content(bank, 0, expert) for expert in range(4)] == [0, 1, 2, 3]
    assert bank.reading().evictions == 0
    assert sorted(files.reads) == [0, 1, 2, 3]
    bank.close()


def test_failed_read_fails_its_expert_only(bank_and_files: tuple[ExpertBank, _Files]) -> None:
    """The other experts of a request are resident, and a later request reads the failed one again."""
    bank, files = bank_and_files
    files.lost.add(1)
    assert _get(bank, 0, _indices(0, 1, 2)) == [1]
    assert bank.slots(0)[1] < 0
    assert _content(bank, 0, 2) == 2
    assert files.reads.count(1) == 1
    files.lost.clear()
    assert _get(bank, 0, _indices(0, 1, 2)) == []
    assert _content(bank, 0, 1) == 1


def test_stalled_read_fails_its_expert_until_it_ends(
    bank_and_files: tuple[ExpertBank, _Files], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read that takes too long fails its expert, keeps its slot, and serves later requests once it ends."""
    bank, files = bank_and_files
    monkeypatch.setattr(bank_module, "MAX_READ_S", 0.05)
    files.stalled.add(1)
    assert _get(bank, 0, _indices(0, 1)) == [1]
    assert _get(bank, 1, _indices(*range(_EXPERTS))) == []
    assert [_content(bank, 1, expert) for expert in range(_EXPERTS)] == list(range(8, 16))
    files.resume.set()
    monkeypatch.setattr(bank_module, "MAX_READ_S", 10.0)
    assert _get(bank, 0, _indices(0, 1)) == []
    assert _content(bank, 0, 1) == 1
    assert files.reads.count(1) == 1


def test_stalled_disk_costs_one_long_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """After one timeout, the waits of a pass's other layers are short until a read ends."""
    bank, files = _bank(_LAYERS * _EXPERTS)
    monkeypatch.setattr(bank_module, "MAX_READ_S", 0.2)
    limits: list[float] = []
    wait = concurrent.futures.wait

    def recorded_wait(futures: Sequence[Future[int]], timeout: float) -> object:
        limits.append(timeout)
        return wait(futures, 0.01)

    monkeypatch.setattr(concurrent.futures, "wait", recorded_wait)
    files.stalled.update(range(_LAYERS * _EXPERTS))
    for layer in range(_LAYERS):
        assert _get(bank, layer, _indices(0, 1)) == [0, 1]
    assert limits == [0.2, bank_module._MAX_STALLED_READ_S, bank_module._MAX_STALLED_READ_S]
    files.resume.set()
    bank.close()


def test_expert_read_ahead_counts_as_a_miss_read_in_time(
    bank_and_files: tuple[ExpertBank, _Files],
) -> None:
    """An expert that only read-ahead brought is a miss and a read-ahead hit; used again, it is a hit."""
    bank, _ = bank_and_files
    bank.read_ahead(0, _indices(5))
    _get(bank, 0, _indices(5, 6))
    reading = bank.reading()
    assert (reading.hits, reading.misses, reading.read_ahead_hits) == (0, 2, 1)
    _get(bank, 0, _indices(5, 6))
    assert bank.reading().hits == 2


def test_resident_table_exists_while_the_whole_layer_is_in_memory() -> None:
    """The table equals the slots, and is gone as soon as one expert of the layer is evicted."""
    bank, _ = _bank(_EXPERTS)
    assert bank.resident_table(0) is None
    _get(bank, 0, np.arange(_EXPERTS))
    table = bank.resident_table(0)
    assert table is not None
    assert table.tolist() == bank.slots(0).tolist()
    _get(bank, 1, _indices(0))
    assert bank.resident_table(0) is None
    bank.close()


def test_bank_without_room_for_one_expert_is_refused() -> None:
    """The message names the setting to raise."""
    with pytest.raises(ModelMemoryError, match=r"experts\.resident_gb"):
        _bank(0)
