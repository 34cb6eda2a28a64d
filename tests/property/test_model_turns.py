"""Models that share a memory: whoever waits gets it in time, and nobody's promise is broken for it."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from machd.served.turns import Claim, ModelState, Rules, next_turn

_LOAD_S = 2.0
_OPEN_S = 1.0
_TURN_S = 10.0
_STEP_S = 0.5


@dataclass
class _World:
    """Models whose loads take a time, and requests that hold them.

    Attributes:
        needs: What each model takes, which is known once its process has opened its files.
        open_s: What is left of the requests of each model.
        refused: Models that can never have their memory.
        leaving: Models that are served no longer, and go once their requests have ended.
        gone: Models that have.
        longest_wait_s: From a first request to the grant of the memory, beside other loads.
    """

    claims: dict[str, Claim]
    rules: Rules
    needs: dict[str, int]
    now_s: float = 0.0
    sized_s: dict[str, float] = field(default_factory=dict)
    done_s: dict[str, float] = field(default_factory=dict)
    open_s: dict[str, list[float]] = field(default_factory=dict)
    refused: set[str] = field(default_factory=set)
    leaving: set[str] = field(default_factory=set)
    gone: set[str] = field(default_factory=set)
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

    def drop(self, name: str) -> None:
        """The client of a request leaves."""
        self.open_s[name].pop()
        self.set(name, leases=len(self.open_s[name]))
        self._note_idle(name)

    def leave(self, name: str) -> None:
        """A reload takes a model away."""
        self.leaving.add(name)
        self.set(name, is_unwanted=True, is_pinned=False)
        self._note_idle(name)

    def come(self, name: str, size: int) -> None:
        """A reload adds a model."""
        self.needs[name] = size
        self.claims[name] = Claim(name, ModelState.UNLOADED)

    def advance(self) -> None:
        """Let half a second pass, and do what is to be done as often as there is something."""
        self.now_s += _STEP_S
        for name, claim in list(self.claims.items()):
            if claim.state is ModelState.READY:
                self._serve(name)
            elif self.sized_s.get(name, self.now_s + 1) <= self.now_s:
                del self.sized_s[name]
                self.set(name, needed_bytes=self.needs[name])
            elif self.done_s.get(name, self.now_s + 1) <= self.now_s:
                self._finish(name)
            self._let_go(name)
        for _ in range(2 * len(self.claims) + 1):
            if not self._act():
                return
        pytest.fail("there is always something more to do")

    def _let_go(self, name: str) -> None:
        claim = self.claims[name]
        has_ended = claim.state in {ModelState.UNLOADED, ModelState.FAILED}
        if name in self.leaving and has_ended and not claim.leases:
            assert claim.reserved_bytes == 0
            self.gone.add(name)
            del self.claims[name]

    def _note_idle(self, name: str) -> None:
        """End what no request waits for, as a model does: a load before its memory is granted, or of one that leaves."""
        claim = self.claims[name]
        if claim.leases:
            return
        self.set(name, idle_since_s=self.now_s)
        if claim.state is ModelState.UNLOADED:
            self.set(name, waiting_since_s=None)
        elif claim.state is ModelState.LOADING and (name in self.leaving or not claim.is_granted):
            self.sized_s.pop(name, None)
            self.set(name, state=ModelState.SUSPENDING, waiting_since_s=None)
            self.done_s[name] = self.now_s + 2 * _STEP_S

    def _serve(self, name: str) -> None:
        left_s = [one - _STEP_S for one in self.open_s.get(name, [])]
        self.open_s[name] = [one for one in left_s if one > 0]
        before, after = self.claims[name].leases, len(self.open_s[name])
        self.set(name, leases=after)
        if before and not after:
            self._note_idle(name)

    def _finish(self, name: str) -> None:
        del self.done_s[name]
        if self.claims[name].state is ModelState.LOADING:
            self.set(name, state=ModelState.READY, ready_since_s=self.now_s, waiting_since_s=None)
            self.set(name, idle_since_s=self.now_s)
            return
        since_s = self.now_s if self.claims[name].leases else None
        self.set(name, state=ModelState.UNLOADED, is_granted=False, waiting_since_s=since_s)

    def _act(self) -> bool:
        turn = next_turn(list(self.claims.values()), self.rules, self.now_s)
        if turn.start is not None:
            self.set(turn.start, state=ModelState.LOADING, needed_bytes=None, is_granted=False)
            self.sized_s[turn.start] = self.now_s + _OPEN_S
        if turn.grant is not None:
            assert self.claims[turn.grant].needed_bytes is not None, "it has opened its files"
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
    needs = {f"m{i}": size for i, size in enumerate(sizes)}
    claims = {
        f"m{i}": Claim(f"m{i}", ModelState.UNLOADED, is_pinned=i == pinned)
        for i in range(len(sizes))
    }
    return _World(claims, Rules(budget, _TURN_S), needs)


@given(
    sizes=st.lists(st.integers(1, 10), min_size=2, max_size=6),
    budget=st.integers(8, 20),
    seed=st.integers(0, 1_000),
    has_pinned=st.booleans(),
)
@settings(max_examples=50, deadline=None)
def test_every_request_is_answered_within_the_budget(
    sizes: list[int], budget: int, seed: int, *, has_pinned: bool
) -> None:
    """Whatever comes when: reserved memory never passes the budget, busy models get their turn, and all end."""
    world = _world(sizes, budget, pinned=0 if has_pinned else None)
    numbers = random.Random(seed)
    for _ in range(200):
        if numbers.random() < 0.2:
            _ask_any(world, numbers)
        world.advance()
    _end(world)

    for name in world.refused:
        pinned_bytes = world.needs["m0"] if has_pinned and name != "m0" else 0
        assert world.needs[name] > budget - pinned_bytes


@given(
    sizes=st.lists(st.integers(1, 10), min_size=2, max_size=6),
    budget=st.integers(8, 20),
    seed=st.integers(0, 1_000),
)
@settings(max_examples=50, deadline=None)
def test_models_that_leave_answer_what_they_have_and_go(
    sizes: list[int], budget: int, seed: int
) -> None:
    """Models come and leave and clients leave at any moment; the memory is kept to, and what has left has none."""
    world = _world(sizes, budget)
    numbers = random.Random(seed)
    for number in range(300):
        if numbers.random() < 0.3:
            _ask_any(world, numbers)
        waiting = [name for name, left_s in world.open_s.items() if left_s and name in world.claims]
        if waiting and numbers.random() < 0.1:
            world.drop(numbers.choice(waiting))
        staying = [name for name in world.claims if name not in world.leaving]
        if len(staying) > 1 and numbers.random() < 0.1:
            world.leave(numbers.choice(staying))
            world.come(f"n{number}", numbers.randint(1, 10))
        world.advance()
    _end(world)

    assert world.leaving == world.gone


def _ask_any(world: _World, numbers: random.Random) -> None:
    name = numbers.choice([one for one in world.claims if one not in world.leaving])
    if world.claims[name].state is not ModelState.FAILED:
        world.ask(name, numbers.choice([0.5, 3.0, 40.0]))


def _end(world: _World) -> None:
    """Let all requests end, and everything that leaves go."""
    for _ in range(10_000):
        if not any(one.leases for one in world.claims.values()) and world.leaving == world.gone:
            return
        world.advance()
    pytest.fail("requests wait for ever")


@given(seed=st.integers(0, 1_000))
@settings(max_examples=30, deadline=None)
def test_no_model_waits_longer_than_a_turn_and_a_load(seed: int) -> None:
    """Three models that are always asked for, and memory for two of them."""
    world = _world([1, 1, 1], 2)
    numbers = random.Random(seed)
    for _ in range(600):
        if numbers.random() < 0.5:
            world.ask(numbers.choice(list(world.claims)), numbers.choice([0.5, 3.0, 30.0]))
        world.advance()

    assert world.longest_wait_s <= _TURN_S + _LOAD_S + _OPEN_S + 2 * _STEP_S


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
