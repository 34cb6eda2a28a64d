"""Adapters come into memory when a row needs them, stay while one does, and make room for others afterwards."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
from support.clocks.manual_clock import ManualClock
from support.clocks.polling import CEILING_S, wait_until

from machd.engine.adapters.low_rank import AdapterWeights, LowRank
from machd.engine.adapters.residency import AdapterLimits, AdapterResidency
from machd.engine.protocol.adapters import Holding
from machd.errors import AdapterError
from machd.request.adapter import Adapter

A, B, C = (Adapter(name.encode(), name=name) for name in "abc")
_BYTES = 100


_LAYERS, _LAYER_S = 10, 0.001


class _Model:
    """Notes what is in it; refuses combinations of more than two. A layer takes a millisecond."""

    def __init__(self) -> None:
        self.keys: list[tuple[Adapter, ...]] = []
        self.clock = ManualClock()
        self.layers = 0

    @property
    def nbytes(self) -> int:
        return _BYTES * len(self.keys)

    def adding(self, key: tuple[Adapter, ...], weights: Sequence[AdapterWeights]) -> Iterator[None]:
        assert len(weights) == len(key)
        if len(key) > 2:
            raise AdapterError("three are too many")
        self.keys.append(key)
        for _ in range(_LAYERS):
            self.layers += 1
            self.clock.advance(_LAYER_S)
            yield

    def remove(self, key: tuple[Adapter, ...]) -> None:
        self.keys.remove(key)


class _Files:
    """Files that are read when a test lets them be."""

    def __init__(self) -> None:
        self.is_open = threading.Event()
        self.is_open.set()
        self.faults: dict[Adapter, Exception] = {}
        self.read_names: list[str] = []

    def read(self, adapter: Adapter) -> AdapterWeights:
        assert self.is_open.wait(CEILING_S)
        self.read_names.append(adapter.name)
        if adapter in self.faults:
            raise self.faults[adapter]
        one = np.ones((1, 1), dtype=np.float32)
        return {"model.layers.0.mlp.up_proj": LowRank(one, one, 1.0)}


def _residency(
    model: _Model, files: _Files, max_loaded: int, pinned: frozenset[str] = frozenset()
) -> AdapterResidency:
    return AdapterResidency(model, files.read, AdapterLimits(max_loaded, pinned), model.clock)


def _held(residency: AdapterResidency, *adapters: Adapter) -> None:
    def is_held() -> bool:
        residency.load(1.0)
        return residency.hold(adapters) is Holding.HELD

    wait_until(is_held, "the adapters are there")


def test_an_adapter_is_read_beside_the_steps_and_once() -> None:
    """Asking for it takes no time while its files are read; a second row finds it."""
    model, files = _Model(), _Files()
    residency = _residency(model, files, 2)
    files.is_open.clear()
    assert residency.hold((A,)) is Holding.LOADING
    assert residency.hold((A,)) is Holding.LOADING
    assert residency.reading().loading == 1
    files.is_open.set()
    _held(residency, A)
    assert residency.hold((A,)) is Holding.HELD
    assert files.read_names == ["a"]
    reading = residency.reading()
    assert (reading.loaded, reading.held, reading.loading, reading.used_bytes) == (1, 1, 0, _BYTES)
    residency.close()


def test_layers_get_an_adapter_within_a_limit_of_time_and_no_row_before_all_have_it() -> None:
    """A load takes many steps, each no longer than its limit and a layer; at least one layer is done at each."""
    model, files = _Model(), _Files()
    residency = _residency(model, files, 2)
    residency.hold((A,))
    wait_until(lambda: residency.load(0.0), "its files are read")
    assert model.layers == 1
    assert residency.load(2.5 * _LAYER_S)
    assert model.layers == 4
    assert residency.hold((A,)) is Holding.LOADING
    assert residency.reading().loading == 1
    while residency.load(0.0):
        assert residency.hold((A,)) is Holding.LOADING
    assert model.layers == _LAYERS
    assert residency.hold((A,)) is Holding.HELD
    residency.close()


def test_closing_removes_an_adapter_that_some_layers_have() -> None:
    """Nothing of it is left in the model."""
    model, files = _Model(), _Files()
    residency = _residency(model, files, 2)
    residency.hold((A,))
    wait_until(lambda: residency.load(0.0), "its files are read")
    residency.close()
    assert model.keys == []


def test_an_adapter_that_no_row_asks_for_any_more_makes_room() -> None:
    """Its row has left while it was loaded, or could not be: the room is another's."""
    model, files = _Model(), _Files()
    residency = _residency(model, files, 1)
    for fault in (None, AdapterError("it does not fit")):
        files.faults = {} if fault is None else {A: fault}
        assert residency.hold((A,)) is Holding.LOADING
        wait_until(lambda: not residency.load(1.0) and not residency.reading().loading, "done")
        _held(residency, B)
        residency.release((B,))
    residency.close()


def test_adapters_that_no_row_holds_are_dropped_where_memory_is_short() -> None:
    """Those unused longest first, as many as are missing; pinned ones and those in use stay."""
    model, files = _Model(), _Files()
    residency = _residency(model, files, 4, frozenset("a"))
    held = replace(C, scale=0.5)
    for one in (A, B, C, held):
        _held(residency, one)
    for one in (A, B, C):
        residency.release((one,))
    assert residency.drop_unused(1)
    assert model.keys == [(A,), (C,), (held,)]
    assert residency.drop_unused(10 * _BYTES)
    assert model.keys == [(A,), (held,)]
    assert not residency.drop_unused(1)
    residency.close()


def test_a_held_adapter_stays_and_the_one_unused_longest_goes() -> None:
    """Room is made of what no row uses, in the order of last use; without any there is no room."""
    model, files = _Model(), _Files()
    residency = _residency(model, files, 2)
    _held(residency, A)
    _held(residency, B)
    assert residency.hold((C,)) is Holding.NO_ROOM
    residency.release((B,))
    residency.release((A,))
    _held(residency, B)  # used last
    residency.release((B,))
    _held(residency, C)
    assert model.keys == [(B,), (C,)]
    residency.close()
    assert model.keys == []


def test_a_pinned_adapter_makes_no_room() -> None:
    """It stays, however long nobody has used it."""
    model, files = _Model(), _Files()
    residency = _residency(model, files, 2, frozenset("a"))
    for one in (A, B, C):
        _held(residency, one)
        residency.release((one,))
    assert model.keys == [(A,), (C,)]
    residency.close()


def test_a_pinned_name_keeps_its_newest_content_alone() -> None:
    """A file that changes under a pinned name is a new adapter, and its old content makes room."""
    model, files = _Model(), _Files()
    residency = _residency(model, files, 2, frozenset("a"))
    changed = replace(A, digest=b"other")
    for one in (A, changed, B):
        _held(residency, one)
        residency.release((one,))
    assert model.keys == [(changed,), (B,)]
    residency.close()


def test_several_adapters_of_a_row_are_one_entry() -> None:
    """Their order counts, since their digests' do; each is read."""
    model, files = _Model(), _Files()
    residency = _residency(model, files, 2)
    _held(residency, A, B)
    assert model.keys == [(A, B)]
    assert files.read_names == ["a", "b"]
    residency.release((A, B))
    assert residency.reading().held == 0
    residency.close()


@pytest.mark.parametrize("fault", [AdapterError("it does not fit"), OSError("gone"), MemoryError()])
def test_what_cannot_be_read_is_said_and_read_again_next_time(fault: Exception) -> None:
    """The error names the adapter; mended files are taken on; nothing of it stays in memory."""
    model, files = _Model(), _Files()
    residency = _residency(model, files, 1)
    files.faults[A] = fault
    with pytest.raises(AdapterError, match=r"does not fit|'a'"):
        _held(residency, A)
    assert residency.reading().loaded == residency.reading().loading == 0
    files.faults.clear()
    _held(residency, A)
    residency.close()


def test_what_the_model_refuses_leaves_nothing() -> None:
    """A combination that cannot be computed is an error, and its room is free."""
    residency = _residency(_Model(), _Files(), 1)
    with pytest.raises(AdapterError, match="three"):
        _held(residency, A, B, C)
    _held(residency, A)
    residency.close()


def test_closing_does_not_wait_for_more_than_the_file_being_read() -> None:
    """What is still to be read is dropped."""
    files = _Files()
    residency = _residency(_Model(), files, 3)
    files.is_open.clear()
    for one in (A, B, C):
        residency.hold((one,))
    threading.Timer(0.05, files.is_open.set).start()
    residency.close()
    assert files.read_names == ["a"]
