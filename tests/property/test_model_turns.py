"""Models that share a memory: whoever waits gets it in time, and nobody's promise is broken for it."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from machd.served.turns import Claim, ModelState, Rules, next_turn

_LOAD_S = 2.0
_TURN_S = 10.0
_STEP_S = 0.5


@dataclass
class _World:
    """Models whose loads take a time, and requests that hold them.

    Attributes:
        ends_s: Of the requests of each model.
        longest_wait_s: From a first request to the grant of the memory, beside other loads.
    """

    claims: dict[str, Claim]
    rules: Rules
    now_s: float = 0.0
    done_s: dict[str, float] = field(default_factory=dict)
    open_s: dict[str, list[float]] = field(default_factory=dict)
    refused: set[str] = field(default_factory=set)
    longest_wait_s: float = 0.0

    def set(self, name: str, **changes: object) -> None:
        self.claims[name] = replace(self.claims[name], **changes)  # type: ignore[arg-type]

    def ask(self, name: str, duration_s: float) -> None:
        """A request comes, which takes so many seconds of a model that is ready."""
        claim = self.claims[name]
        self.open_s.setdefault(name, []).append(duration_s)
        since_s = claim.waiting_since_s
        if claim.state is not ModelState.READY and since_s is None:
            since_s = self.now_s
        self.set(name, leases=claim.leases + 1, waiting_since_s=since_s)

    def advance(self, needs: dict[str, int]) -> None:
        """Let half a second pass, and do what is to be done as often as there is something."""
        self.now_s += _STEP_S
        for name, claim in list(self.claims.items()):
            if claim.state is ModelState.READY:
                self._serve(name)
            elif self.done_s.get(name, self.now_s + 1) <= self.now_s:
                self._finish(name)
        for _ in range(2 * len(self.claims)):
            if not self._act(needs):
                return
        pytest.fail("there is always something more to do")

    def _serve(self, name: str) -> None:
        left_s = [one - _STEP_S for one in self.open_s.get(name, [])]
        self.open_s[name] = [one for one in left_s if one > 0]
        before, after = self.claims[name].leases, len(self.open_s[name])
        self.set(name, leases=after)
        if before and not after:
            self.set(name, idle_since_s=self.now_s)

    def _finish(self, name: str) -> None:
        del self.done_s[name]
        if self.claims[name].state is ModelState.LOADING:
            self.set(name, state=ModelState.READY, ready_since_s=self.now_s, waiting_since_s=None)
            self.set(name, idle_since_s=self.now_s)
            return
        since_s = self.now_s if self.claims[name].leases else None
        self.set(name, state=ModelState.UNLOADED, is_granted=False, waiting_since_s=since_s)

    def _act(self, needs: dict[str, int]) -> bool:
        turn = next_turn(list(self.claims.values()), self.rules, self.now_s)
        if turn.start is not None:
            self.set(turn.start, state=ModelState.LOADING, needed_bytes=needs[turn.start])
        if turn.grant is not None:
            since_s = self.claims[turn.grant].waiting_since_s
            assert since_s is not None
            self.longest_wait_s = max(self.longest_wait_s, self.now_s - since_s)
            self.set(turn.grant, is_granted=True)
            self.done_s[turn.grant] = self.now_s + _LOAD_S
        if turn.refuse is not None:
            self.refused.add(turn.refuse)
            self.open_s[turn.refuse] = []
            self.set(turn.refuse, state=ModelState.FAILED, leases=0, waiting_since_s=None)
        for name in turn.give_way:
            claim = self.claims[name]
            assert claim.state is ModelState.READY
            assert not claim.is_pinned or claim.leases == 0
            if claim.leases:
                assert self.now_s >= claim.ready_since_s + _TURN_S, "it has had its turn"
            self.set(name, state=ModelState.SUSPENDING)
            self.done_s[name] = self.now_s + _STEP_S
        assert self.rules.budget_bytes is not None
        assert sum(one.reserved_bytes for one in self.claims.values()) <= self.rules.budget_bytes
        return bool(turn.start or turn.grant or turn.refuse or turn.give_way)


def _world(sizes: list[int], budget: int, *, pinned: int | None = None) -> _World:
    claims = {
        f"m{i}": Claim(f"m{i}", ModelState.UNLOADED, is_pinned=i == pinned)
        for i in range(len(sizes))
    }
    return _World(claims, Rules(budget, _TURN_S))


@given(
    sizes=st.lists(st.integers(1, 10), min_size=2, max_size=6),
    budget=st.integers(8, 20),
    seed=st.integers(0, 1_000),
    has_pinned=st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_every_request_is_answered_within_the_budget(
    sizes: list[int], budget: int, seed: int, *, has_pinned: bool
) -> None:
    """Whatever comes when: reserved memory never passes the budget, busy models get their turn, and all end."""
    world = _world(sizes, budget, pinned=0 if has_pinned else None)
    needs = {f"m{i}": size for i, size in enumerate(sizes)}
    numbers = random.Random(seed)
    for _ in range(200):
        if numbers.random() < 0.2:
            name = numbers.choice(list(world.claims))
            if world.claims[name].state is not ModelState.FAILED:
                world.ask(name, numbers.choice([0.5, 3.0, 40.0]))
        world.advance(needs)
    for _ in range(10_000):
        if not any(one.leases for one in world.claims.values()):
            break
        world.advance(needs)

    assert not any(one.leases for one in world.claims.values())
    for name in world.refused:
        pinned_bytes = needs["m0"] if has_pinned and name != "m0" else 0
        assert needs[name] > budget - pinned_bytes


@given(seed=st.integers(0, 1_000))
@settings(max_examples=60, deadline=None)
def test_no_model_waits_longer_than_a_turn_and_a_load(seed: int) -> None:
    """Three models that are always asked for, and memory for two of them."""
    world = _world([1, 1, 1], 2)
    needs = dict.fromkeys(world.claims, 1)
    numbers = random.Random(seed)
    for _ in range(600):
        if numbers.random() < 0.5:
            world.ask(numbers.choice(list(world.claims)), numbers.choice([0.5, 3.0, 30.0]))
        world.advance(needs)

    assert world.longest_wait_s <= _TURN_S + _LOAD_S + 2 * _STEP_S


def test_who_is_idle_gives_way_before_who_is_busy() -> None:
    """At once, the least recently used first, and no more of them than needed."""
    claims = [
        Claim("busy", ModelState.READY, 4, leases=1, ready_since_s=-100.0),
        Claim("old", ModelState.READY, 1, idle_since_s=1.0),
        Claim("older", ModelState.READY, 3, idle_since_s=0.0),
        Claim("new", ModelState.LOADING, 3, waiting_since_s=9.0),
    ]
    turn = next_turn(claims, Rules(8, 60.0), 10.0)

    assert (turn.grant, turn.give_way) == (None, ("older",))


def test_a_busy_model_gives_way_once_another_has_waited_for_a_turn() -> None:
    """Not before, and a look is due at that moment."""
    claims = [
        Claim("busy", ModelState.READY, 4, leases=1, ready_since_s=-100.0),
        Claim("new", ModelState.LOADING, 3, waiting_since_s=9.0),
    ]
    early = next_turn(claims, Rules(5, 60.0), 10.0)
    due = next_turn(claims, Rules(5, 60.0), early.wake_s)

    assert (early.give_way, early.wake_s) == ((), 69.0)
    assert due.give_way == ("busy",)


def test_a_pinned_model_never_gives_way_and_who_cannot_fit_beside_it_is_refused() -> None:
    """At once, however long it has waited."""
    claims = [
        Claim("pinned", ModelState.READY, 4, is_pinned=True),
        Claim("new", ModelState.LOADING, 3, waiting_since_s=-1000.0),
    ]

    assert next_turn(claims, Rules(6, 60.0), 0.0).refuse == "new"


def test_one_model_loads_at_a_time_in_the_order_of_their_requests() -> None:
    """The second is started once the first is ready."""
    claims = [
        Claim("second", ModelState.UNLOADED, waiting_since_s=2.0),
        Claim("first", ModelState.UNLOADED, waiting_since_s=1.0),
    ]
    rules = Rules(10, 60.0)

    assert next_turn(claims, rules, 3.0).start == "first"
    claims[1] = replace(claims[1], state=ModelState.LOADING, needed_bytes=1, is_granted=True)
    assert next_turn(claims, rules, 3.0).start is None


def test_idle_time_begins_when_the_last_lease_ends() -> None:
    """A model is unloaded after its time to live; while it is held, never."""
    idle = Claim("a", ModelState.READY, 1, ttl_s=5.0, idle_since_s=100.0)
    rules = Rules(10, 60.0)

    assert next_turn([idle], rules, 104.0).wake_s == 105.0
    assert next_turn([idle], rules, 105.0).give_way == ("a",)
    assert next_turn([replace(idle, leases=1)], rules, 200.0).give_way == ()
