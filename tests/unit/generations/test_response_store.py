"""The store of responses: its limits hold, the largest namespace is evicted first, keys are separate."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from machd.generations.response_store import ResponseStore, StoredResponse, Turn

_MAX_RESPONSES = 4
_MAX_BYTES = 100

_NAMESPACES = st.sampled_from(["alice", "bob", "carol"])
_IDS = st.sampled_from([f"resp_{number}" for number in range(6)])


def _response(
    answer: bytes = b"{}",
    items: tuple[bytes, ...] = (),
    output_ids: tuple[str, ...] = (),
    after: StoredResponse | None = None,
) -> StoredResponse:
    turn = Turn(items, None if after is None else after.turn)
    return StoredResponse(answer, turn, output_ids)


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
    long = _response(b"x", (b"x" * 60,), after=_response(b"x", (b"x" * 60,)))
    assert not store.put("alice", "b", long)
    assert store.get("alice", "a") is not None
    assert store.evictions == 0


@pytest.mark.parametrize(("max_responses", "max_bytes"), [(0, 100), (4, 0), (0, 0)])
def test_a_bound_of_zero_keeps_nothing(max_responses: int, max_bytes: int) -> None:
    """Either bound alone switches the store off."""
    store = _store(max_responses=max_responses, max_bytes=max_bytes)
    assert not store.put("alice", "a", _response())
    assert len(store) == 0
    assert store.size_bytes == 0


def test_a_conversation_counts_its_length() -> None:
    """Each turn once, however many responses stand on it: twice the turns, twice the bytes."""
    store = _store(max_responses=1000, max_bytes=1_000_000)
    last: StoredResponse | None = None
    for number in range(200):
        last = _response(b"a" * 10, (b"i" * 60, b"o" * 30), after=last)
        store.put("alice", f"resp_{number}", last)
        assert store.size_bytes == 100 * (number + 1)
    assert last is not None
    assert last.turn.conversation() == (b"i" * 60, b"o" * 30) * 200


def test_what_a_conversation_stands_on_stays() -> None:
    """A response that goes leaves its turn to those that continue it, and the last takes it all."""
    store = _store()
    first = _response(b"1" * 10, (b"one",))
    second = _response(b"2" * 10, (b"two",), after=first)
    other = _response(b"3" * 10, (b"three",), after=first)
    for name, response in (("a", first), ("b", second), ("c", other)):
        store.put("alice", name, response)
    assert store.size_bytes == 30 + len(b"onetwothree")
    store.delete("alice", "a")
    assert store.size_bytes == 20 + len(b"onetwothree")
    found = store.get("alice", "b")
    assert found is not None
    assert found.turn.conversation() == (b"one", b"two")
    store.delete("alice", "b")
    assert store.size_bytes == 10 + len(b"onethree")
    store.delete("alice", "c")
    assert store.size_bytes == 0


def test_a_turn_that_was_dropped_meanwhile_counts_again() -> None:
    """A request goes on with what it found, though the store forgets it before the answer."""
    store = _store()
    first = _response(b"1", (b"x" * 40,))
    store.put("alice", "a", first)
    store.delete("alice", "a")
    store.put("alice", "b", _response(b"2", (b"y" * 9,), after=first))
    assert store.size_bytes == 50


@pytest.mark.parametrize(
    ("answer", "many"), [(b"x" * 30, 10), (b"x", 100)], ids=["by bytes", "by number"]
)
def test_nobody_drives_out_the_others(answer: bytes, many: int) -> None:
    """However much alice stores, what bob has less of stays; alice's own oldest goes."""
    store = _store()
    store.put("bob", "kept", _response(b"x" * 20))
    for number in range(many):
        assert store.put("alice", f"resp_{number}", _response(answer))
    assert store.get("bob", "kept") is not None
    assert store.get("alice", f"resp_{many - 1}") is not None
    assert store.get("alice", "resp_0") is None


def test_whoever_has_the_most_makes_room_for_a_newcomer() -> None:
    """A store that one key has filled still takes what another brings."""
    store = _store()
    for number in range(3):
        store.put("alice", f"resp_{number}", _response(b"x" * 30))
    assert store.put("bob", "new", _response(b"x" * 40))
    assert store.get("alice", "resp_0") is None
    assert store.get("alice", "resp_2") is not None


def test_a_very_long_conversation_goes_without_a_fuss() -> None:
    """Thousands of turns are counted, read and freed without recursion."""
    store = _store(max_responses=2, max_bytes=1_000_000)
    last: StoredResponse | None = None
    for number in range(8192):
        last = _response(b"{}", (b"item",), after=last)
        if number % 1000 == 0:
            store.put("alice", "last", last)
    assert last is not None
    store.put("alice", "last", last)
    assert store.size_bytes == 2 + 4 * 8192
    assert store.delete("alice", "last")
    assert store.size_bytes == 0
    del last


def test_an_item_is_found_by_whoever_made_it() -> None:
    """A chain holds earlier items too; each is found under the response that made it alone."""
    store = _store()
    first = _response(items=(b"in", b"out"), output_ids=("msg_1",))
    store.put("alice", "a", first)
    made = (b"in2", b"thought", b"out2")
    store.put("alice", "b", _response(items=made, output_ids=("rs_2", "msg_2"), after=first))

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
        self.seen: dict[str, list[StoredResponse]] = {}

    @rule(
        namespace=_NAMESPACES,
        response_id=_IDS,
        sizes=st.lists(st.integers(0, 40), max_size=3),
        output=st.integers(0, 3),
        after=st.none() | st.integers(0, 20),
    )
    def put(
        self, namespace: str, response_id: str, sizes: list[int], output: int, after: int | None
    ) -> None:
        """Also after responses that were dropped: a request may have found them before."""
        items = tuple(bytes([65 + len(namespace)]) * size for size in sizes)
        ids = tuple(f"{response_id}/{one}" for one in range(min(output, len(items))))
        seen = self.seen.setdefault(namespace, [])
        previous = seen[after % len(seen)] if seen and after is not None else None
        response = _response(namespace.encode(), items, ids, previous)
        seen.append(response)
        key = (namespace, response_id)
        kept = self.store.put(namespace, response_id, response)
        self.model = [one for one in self.model if one[0] != key]
        if self._bytes_of([response]) <= _MAX_BYTES:
            self.model.append((key, response))
            self._make_room(namespace)
        assert kept == (key in dict(self.model))

    @rule(namespace=_NAMESPACES, response_id=_IDS)
    def get(self, namespace: str, response_id: str) -> None:
        found = self.store.get(namespace, response_id)
        assert found is dict(self.model).get((namespace, response_id))
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
            assert found == maker.turn.items[-len(maker.output_ids) :][number]
            self._touch((namespace, response_id))

    @rule(namespace=_NAMESPACES, response_id=_IDS)
    def delete(self, namespace: str, response_id: str) -> None:
        key = (namespace, response_id)
        assert self.store.delete(namespace, response_id) == (key in dict(self.model))
        self.model = [one for one in self.model if one[0] != key]

    @invariant()
    def bounds_hold(self) -> None:
        assert len(self.store) == len(self.model) <= _MAX_RESPONSES
        kept = [response for _, response in self.model]
        assert self.store.size_bytes == self._bytes_of(kept) <= _MAX_BYTES

    def _make_room(self, newcomer: str) -> None:
        while len(self.model) > _MAX_RESPONSES:
            self._drop(len, newcomer)
        while self._bytes_of([one for _, one in self.model]) > _MAX_BYTES:
            self._drop(self._bytes_of, newcomer)

    def _drop(self, size: Callable[[list[StoredResponse]], int], newcomer: str) -> None:
        held: dict[str, list[StoredResponse]] = {}
        for (namespace, _), response in self.model:
            held.setdefault(namespace, []).append(response)
        largest = max(held, key=lambda name: (size(held[name]), name != newcomer, name))
        self.model.remove(next(one for one in self.model if one[0][0] == largest))

    @staticmethod
    def _bytes_of(responses: list[StoredResponse]) -> int:
        turns = {turn for response in responses for turn in response.turn.lineage()}
        answers = sum(len(response.answer) for response in responses)
        return answers + sum(len(item) for turn in turns for item in turn.items)

    def _touch(self, key: tuple[str, str]) -> None:
        self.model.sort(key=lambda one: one[0] == key)


TestResponseStore = _Machine.TestCase
