"""The daemon's lifecycle state, and whether it takes new work."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

from machd.errors import ConflictError, DrainingError, EngineFaultError, NotReadyError

StateWatcher = Callable[["State"], None]
"""Told of every new state, on the event loop; must be quick and must not raise."""

_RETRY_AFTER_S = 5
"""What a client is told while the daemon loads or leaves: a restart takes about as long."""


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
        """Begin by loading."""
        self._state = State.LOADING
        self._is_held = False
        self._watchers: list[StateWatcher] = []

    @property
    def state(self) -> State:
        """The state now."""
        return self._state

    @property
    def is_held(self) -> bool:
        """Return whether an operator drains it, so that it can resume."""
        return self._is_held

    def watch(self, watcher: StateWatcher) -> None:
        """Tell of every new state from now on."""
        self._watchers.append(watcher)

    def become(self, state: State) -> None:
        """Move on; going to where we are is no move.

        Draining that comes from here is the beginning of the end, also where an operator had the
        daemon drain before; for that see :meth:`hold`.
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
        """Take nothing new until :meth:`resume`, and finish what there is. Again is no mistake.

        Raises:
            ConflictError: The daemon takes nothing now, for another reason.
        """
        if self._is_held:
            return
        if self._state is not State.READY:
            raise ConflictError(f"the daemon is {self._state}; only a ready one can be drained")
        self._move(State.DRAINING, is_held=True)

    def resume(self) -> None:
        """Take new work again. A daemon that is ready stays so.

        Raises:
            ConflictError: It takes nothing for another reason: it loads, stops or has failed.
        """
        if self._state is State.READY:
            return
        if not self._is_held:
            reason = "stopping" if self._state is State.DRAINING else self._state.value
            raise ConflictError(f"the daemon is {reason}; only a drained one can resume")
        self.become(State.READY)

    def restart(self) -> None:
        """Note that the engine process is being replaced; what leaves or drains goes on doing that."""
        if self._state is State.READY:
            self.become(State.RESTARTING)

    def restarted(self) -> None:
        """Note that another engine process serves."""
        if self._state is State.RESTARTING:
            self.become(State.READY)

    def check_accepting(self) -> None:
        """Let new work in, or say why not.

        Raises:
            NotReadyError: The model is still loading.
            DrainingError: The daemon is finishing.
            EngineFaultError: The engine is gone.
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
        """Check that a router may send new work, or say why not.

        A leaving daemon accepts work that arrives all the same: routers poll, and learn late.

        Raises:
            MachdError: The daemon is leaving, or accepts no work (:meth:`check_accepting`).
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
