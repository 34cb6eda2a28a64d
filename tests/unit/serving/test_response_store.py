"""The store of responses: its bounds hold, the least recently used go, keys never see each other."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from machd.serving.response_store import ResponseStore, StoredResponse

_MAX_RESPONSES = 4
_MAX_BYTES = 100

_NAMESPACES = st.sampled_from(["alice", "bob"])
_IDS = st.sampled_from([f"resp_{number}" for number in range(6)])


def _response(
    answer: bytes = b"{}", items: tuple[bytes, ...] = (), output_ids: tuple[str, ...] = ()
) -> StoredResponse:
    return StoredResponse(answer, items, output_ids)


def _store(*, max_responses: int = _MAX_RESPONSES, max_bytes: int = _MAX_BYTES) -> ResponseStore:
    return ResponseStore(max_responses=max_responses, max_bytes=max_bytes)


def test_the_least_recently_used_makes_room() -> None:
    """Looking at a response, or at one of its items, keeps it; the next one goes instead."""
    store = _store(max_responses=3)
    for name in ("a", "b", "c"):
        store.put("alice", name, _response(items=(b"1",), output_ids=(f"msg_{name}",)))
    assert store.get("alice", "a") is not None
    assert store.item("alice", "msg_b") == b"1"
    store.put("alice", "d", _response())

    assert store.get("alice", "c") is None
    assert store.item("alice", "msg_c") is None
    assert [store.get("alice", name) is not None for name in ("a", "b", "d")] == [True] * 3
    assert store.evictions == 1


def test_bytes_make_room_too() -> None:
    """One large response takes the room of several small ones, and counts answer and items."""
    store = _store(max_responses=10)
    for name in ("a", "b", "c"):
        store.put("alice", name, _response(b"x" * 20, (b"y" * 10,)))
    assert store.size_bytes == 90
    assert store.put("alice", "d", _response(b"x" * 70))

    assert store.size_bytes == 100
    assert store.get("alice", "b") is None
    assert store.get("alice", "c") is not None
    assert store.evictions == 2


def test_what_can_never_fit_costs_nobody_a_place() -> None:
    """A response beyond the whole room is not kept, and nothing is given up for it."""
    store = _store()
    store.put("alice", "a", _response())
    assert not store.put("alice", "b", _response(b"x" * (_MAX_BYTES + 1)))
    assert store.get("alice", "a") is not None
    assert store.evictions == 0


@pytest.mark.parametrize(("max_responses", "max_bytes"), [(0, 100), (4, 0), (0, 0)])
def test_a_bound_of_zero_keeps_nothing(max_responses: int, max_bytes: int) -> None:
    """Either bound alone switches the store off."""
    store = _store(max_responses=max_responses, max_bytes=max_bytes)
    assert not store.put("alice", "a", _response())
    assert len(store) == 0
    assert store.size_bytes == 0


def test_an_item_is_found_by_whoever_made_it() -> None:
    """A chain holds earlier items too; each is found under the response that made it alone."""
    store = _store()
    store.put("alice", "a", _response(items=(b"in", b"out"), output_ids=("msg_1",)))
    chain = (b"in", b"out", b"in2", b"thought", b"out2")
    store.put("alice", "b", _response(items=chain, output_ids=("rs_2", "msg_2")))

    assert store.item("alice", "msg_1") == b"out"
    assert store.item("alice", "rs_2") == b"thought"
    assert store.item("alice", "msg_2") == b"out2"
    assert store.item("bob", "msg_2") is None
    store.delete("alice", "a")
    assert store.item("alice", "msg_1") is None
    assert store.item("alice", "msg_2") == b"out2"


class _Machine(RuleBasedStateMachine):
    """Any sequence of calls, held against a list that does the same slowly."""

    def __init__(self) -> None:
        super().__init__()
        self.store = _store()
        self.model: list[tuple[tuple[str, str], StoredResponse]] = []

    @rule(
        namespace=_NAMESPACES,
        response_id=_IDS,
        sizes=st.lists(st.integers(0, 60), max_size=3),
        output=st.integers(0, 3),
    )
    def put(self, namespace: str, response_id: str, sizes: list[int], output: int) -> None:
        items = tuple(bytes([65 + len(namespace)]) * size for size in sizes)
        ids = tuple(f"{response_id}/{one}" for one in range(min(output, len(items))))
        response = StoredResponse(namespace.encode(), items, ids)
        kept = self.store.put(namespace, response_id, response)
        self.model = [one for one in self.model if one[0] != (namespace, response_id)]
        assert kept == (response.size_bytes <= _MAX_BYTES)
        if kept:
            self.model.append(((namespace, response_id), response))
            while len(self.model) > _MAX_RESPONSES or self._model_bytes() > _MAX_BYTES:
                self.model.pop(0)

    @rule(namespace=_NAMESPACES, response_id=_IDS)
    def get(self, namespace: str, response_id: str) -> None:
        found = self.store.get(namespace, response_id)
        assert found == dict(self.model).get((namespace, response_id))
        if found is not None:
            assert found.answer == namespace.encode()
            self._touch((namespace, response_id))

    @rule(namespace=_NAMESPACES, response_id=_IDS, number=st.integers(0, 2))
    def item(self, namespace: str, response_id: str, number: int) -> None:
        maker = dict(self.model).get((namespace, response_id))
        found = self.store.item(namespace, f"{response_id}/{number}")
        if maker is None or number >= len(maker.output_ids):
            assert found is None
        else:
            assert found == maker.items[len(maker.items) - len(maker.output_ids) + number]
            self._touch((namespace, response_id))

    @rule(namespace=_NAMESPACES, response_id=_IDS)
    def delete(self, namespace: str, response_id: str) -> None:
        key = (namespace, response_id)
        assert self.store.delete(namespace, response_id) == (key in dict(self.model))
        self.model = [one for one in self.model if one[0] != key]

    @invariant()
    def bounds_hold(self) -> None:
        assert len(self.store) == len(self.model) <= _MAX_RESPONSES
        assert self.store.size_bytes == self._model_bytes() <= _MAX_BYTES

    def _model_bytes(self) -> int:
        return sum(response.size_bytes for _, response in self.model)

    def _touch(self, key: tuple[str, str]) -> None:
        self.model.sort(key=lambda one: one[0] == key)


TestResponseStore = _Machine.TestCase
