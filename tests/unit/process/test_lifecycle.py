"""The daemon's states: where each leads, and what a client is told in it."""

from __future__ import annotations

import pytest

from machd.errors import (
    ConflictError,
    DrainingError,
    EngineFaultError,
    MachdError,
    NotReadyError,
    UnavailableError,
)
from machd.process.lifecycle import Lifecycle, State

WAYS = {
    State.LOADING: [State.READY, State.DRAINING, State.STOPPED, State.FAILED],
    State.READY: [
        State.RESTARTING,
        State.LEAVING,
        State.DRAINING,
        State.STOPPED,
        State.FAILED,
    ],
    State.RESTARTING: [
        State.READY,
        State.LEAVING,
        State.DRAINING,
        State.STOPPED,
        State.FAILED,
    ],
    State.LEAVING: [State.DRAINING, State.STOPPED, State.FAILED],
    State.DRAINING: [State.READY, State.STOPPED, State.FAILED],
    State.FAILED: [State.STOPPED],
    State.STOPPED: [],
}


def _in(state: State) -> Lifecycle:
    lifecycle = Lifecycle()
    if state in {State.LEAVING, State.RESTARTING}:
        lifecycle.become(State.READY)
    lifecycle.become(state)
    return lifecycle


def test_a_daemon_begins_by_loading() -> None:
    """Before anything is known, no work is taken."""
    assert Lifecycle().state is State.LOADING


@pytest.mark.parametrize("target", State)
@pytest.mark.parametrize("start", State)
def test_a_state_leads_where_it_may_and_nowhere_else(start: State, target: State) -> None:
    """Allowed moves happen, staying is no move, and any other move changes nothing."""
    lifecycle = _in(start)
    if target is start or target in WAYS[start]:
        lifecycle.become(target)
        assert lifecycle.state is target
    else:
        with pytest.raises(AssertionError, match="does not lead to"):
            lifecycle.become(target)
        assert lifecycle.state is start


def test_a_stopped_daemon_stays_stopped() -> None:
    """The last state leads nowhere, and every other one leads to it."""
    assert WAYS[State.STOPPED] == []
    assert all(State.STOPPED in ways for state, ways in WAYS.items() if state is not State.STOPPED)


def test_a_ready_daemon_takes_work() -> None:
    """A ready daemon accepts requests, and a router may send them."""
    lifecycle = _in(State.READY)
    lifecycle.check_accepting()
    lifecycle.check_ready()


def test_a_leaving_daemon_accepts_work_but_is_not_ready() -> None:
    """A leaving daemon accepts requests, while a router is told to send none."""
    lifecycle = _in(State.LEAVING)
    lifecycle.check_accepting()
    with pytest.raises(DrainingError, match="about to drain"):
        lifecycle.check_ready()


@pytest.mark.parametrize(
    ("state", "error_class"),
    [
        (State.LOADING, NotReadyError),
        (State.DRAINING, DrainingError),
        (State.STOPPED, DrainingError),
        (State.FAILED, EngineFaultError),
    ],
)
def test_every_other_state_says_why_not(state: State, error_class: type[MachdError]) -> None:
    """A client gets a 503 with the state's own code, and a time to come back where one is known."""
    lifecycle = _in(state)
    for check in (lifecycle.check_accepting, lifecycle.check_ready):
        with pytest.raises(error_class) as refusal:
            check()

        error = refusal.value
        assert type(error) is error_class
        assert error.http_status == 503
        assert not isinstance(error, UnavailableError) or error.retry_after_s >= 1


def test_a_drained_daemon_can_resume() -> None:
    """Draining is not the end: work is taken again after it."""
    lifecycle = _in(State.READY)
    lifecycle.become(State.DRAINING)
    lifecycle.become(State.READY)
    lifecycle.check_accepting()


def test_an_operator_holds_and_resumes() -> None:
    """Held, it drains as before a stop; both may be asked for twice."""
    lifecycle = _in(State.READY)
    for _ in range(2):
        lifecycle.hold()
        assert (lifecycle.state, lifecycle.is_held) == (State.DRAINING, True)
        with pytest.raises(DrainingError):
            lifecycle.check_accepting()
    for _ in range(2):
        lifecycle.resume()
        assert (lifecycle.state, lifecycle.is_held) == (State.READY, False)
    lifecycle.check_accepting()


@pytest.mark.parametrize("state", [one for one in State if one is not State.READY])
def test_only_a_ready_daemon_is_held_and_only_a_held_one_resumes(state: State) -> None:
    """One that loads, stops or has failed does neither, and stays what it is."""
    lifecycle = _in(state)
    for ask in (lifecycle.hold, lifecycle.resume):
        with pytest.raises(ConflictError):
            ask()
        assert (lifecycle.state, lifecycle.is_held) == (state, False)


def test_a_stop_ends_the_hold() -> None:
    """A held daemon that is told to stop cannot be brought back."""
    lifecycle = _in(State.READY)
    lifecycle.hold()
    lifecycle.become(State.DRAINING)
    assert not lifecycle.is_held
    with pytest.raises(ConflictError):
        lifecycle.resume()


def test_watchers_are_told_of_every_move_and_of_no_other() -> None:
    """Once for each new state, when it is in force already."""
    lifecycle = Lifecycle()
    seen: list[tuple[State, State]] = []
    lifecycle.watch(lambda state: seen.append((state, lifecycle.state)))
    lifecycle.become(State.READY)
    lifecycle.become(State.READY)
    lifecycle.hold()
    lifecycle.become(State.DRAINING)
    lifecycle.become(State.STOPPED)
    states = [State.READY, State.DRAINING, State.STOPPED]
    assert seen == [(state, state) for state in states]


def test_a_daemon_whose_engine_is_replaced_takes_work_and_is_not_ready() -> None:
    """Requests wait for the new process; routers are to send them elsewhere."""
    lifecycle = _in(State.READY)
    lifecycle.restart()
    lifecycle.check_accepting()
    with pytest.raises(NotReadyError):
        lifecycle.check_ready()
    lifecycle.restarted()
    lifecycle.check_ready()


@pytest.mark.parametrize("state", [State.LEAVING, State.DRAINING, State.STOPPED, State.FAILED])
def test_a_daemon_that_leaves_goes_on_leaving_while_its_engine_is_replaced(state: State) -> None:
    """Its state is the daemon's, not the engine's."""
    lifecycle = _in(state)
    lifecycle.restart()
    lifecycle.restarted()
    assert lifecycle.state is state
