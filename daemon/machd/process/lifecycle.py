"""The daemon's lifecycle state, and whether it takes new work."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

from machd.errors import ConflictError, DrainingError, EngineFaultError, NotReadyError

StateWatcher = Callable[["State"], None]
"""Called with every new state, on the event loop; must be quick and must not raise."""

_RETRY_AFTER_S = 5
"""Retry-After while the daemon loads or shuts down: about the time of a restart."""


class State(StrEnum):
    """The daemon's states, in the order they come."""

    LOADING = "loading"
    READY = "ready"
    RESTARTING = "restarting"
    LEAVING = "leaving"
    DRAINING = "draining"
    STOPPED = "stopped"
    FAILED = "failed"


_NEXT = {
    State.LOADING: {State.READY, State.DRAINING, State.STOPPED, State.FAILED},
    State.READY: {
        State.RESTARTING,
        State.LEAVING,
        State.DRAINING,
        State.FAILED,
        State.STOPPED,
    },
    State.RESTARTING: {State.READY, State.LEAVING, State.DRAINING, State.FAILED, State.STOPPED},
    State.LEAVING: {State.DRAINING, State.FAILED, State.STOPPED},
    State.DRAINING: {State.READY, State.STOPPED, State.FAILED},
    State.STOPPED: set(),
    State.FAILED: {State.STOPPED},
}


class Lifecycle:
    """The one owner of the state. Lives on the event loop."""

    def __init__(self) -> None:
        """Begin in the loading state."""
        self._state = State.LOADING
        self._is_held = False
        self._watchers: list[StateWatcher] = []

    @property
    def state(self) -> State:
        """The present state."""
        return self._state

    @property
    def is_held(self) -> bool:
        """Return whether an operator has it drain, so that it can resume."""
        return self._is_held

    def watch(self, watcher: StateWatcher) -> None:
        """Call back for every later state."""
        self._watchers.append(watcher)

    def become(self, state: State) -> None:
        """Enter another state; no effect if it is the present one.

        Draining from here always ends in a shutdown, also if an operator had the daemon drain before; see
        :meth:`hold` for that.
        """
        self._move(state, is_held=False)

    def _move(self, state: State, *, is_held: bool) -> None:
        self._is_held = is_held
        if state is self._state:
            return
        assert state in _NEXT[self._state], f"{self._state} does not lead to {state}"
        self._state = state
        for watcher in self._watchers:
            watcher(state)

    def hold(self) -> None:
        """Refuse new work until :meth:`resume`, and finish open requests. Idempotent.

        Raises:
            ConflictError: The daemon already refuses work for another reason.
        """
        if self._is_held:
            return
        if self._state is not State.READY:
            raise ConflictError(f"the daemon is {self._state}; only a ready one can be drained")
        self._move(State.DRAINING, is_held=True)

    def resume(self) -> None:
        """Accept new work again. No effect on a ready daemon.

        Raises:
            ConflictError: It refuses work for another reason: it loads, stops or has failed.
        """
        if self._state is State.READY:
            return
        if not self._is_held:
            reason = "stopping" if self._state is State.DRAINING else self._state.value
            raise ConflictError(f"the daemon is {reason}; only a drained one can resume")
        self.become(State.READY)

    def restart(self) -> None:
        """Note that the engine process is being replaced; a daemon that drains or shuts down goes on with that."""
        if self._state is State.READY:
            self.become(State.RESTARTING)

    def restarted(self) -> None:
        """Note that another engine process serves."""
        if self._state is State.RESTARTING:
            self.become(State.READY)

    def check_accepting(self) -> None:
        """Raise the reason if the daemon accepts no work.

        Raises:
            NotReadyError: The model is still loading.
            DrainingError: The daemon is draining.
            EngineFaultError: The engine has ended.
        """
        match self._state:
            case State.READY | State.RESTARTING | State.LEAVING:
                return
            case State.LOADING:
                raise NotReadyError("the model is still loading", retry_after_s=_RETRY_AFTER_S)
            case State.DRAINING | State.STOPPED:
                raise DrainingError(
                    "the server is draining: it finishes what it has and takes nothing new",
                    retry_after_s=_RETRY_AFTER_S,
                )
            case State.FAILED:
                raise EngineFaultError("the engine has stopped; the server is restarting")

    def check_ready(self) -> None:
        """Raise the reason if a router should send no new work.

        A daemon that shuts down still accepts work that arrives: routers poll, and notice late.

        Raises:
            MachdError: The daemon shuts down, or accepts no work (:meth:`check_accepting`).
        """
        if self._state is State.LEAVING:
            raise DrainingError(
                "the server is about to drain: send new work to another one",
                retry_after_s=_RETRY_AFTER_S,
            )
        if self._state is State.RESTARTING:
            raise NotReadyError(
                "the engine process is being replaced; requests wait for the new one",
                retry_after_s=_RETRY_AFTER_S,
            )
        self.check_accepting()
