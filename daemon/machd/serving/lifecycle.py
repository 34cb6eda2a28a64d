"""Where the daemon is in its life, and whether it takes new work."""

from __future__ import annotations

from enum import StrEnum

from machd.errors import DrainingError, EngineFaultError, NotReadyError

__all__ = ["Lifecycle", "State"]

_RETRY_AFTER_S = 5
"""What a client is told while the daemon loads or leaves: a restart takes about as long."""


class State(StrEnum):
    """The daemon's states, in the order they come."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    STOPPED = "stopped"
    FAILED = "failed"


_NEXT = {
    State.LOADING: {State.READY, State.DRAINING, State.STOPPED, State.FAILED},
    State.READY: {State.DRAINING, State.FAILED, State.STOPPED},
    State.DRAINING: {State.READY, State.STOPPED, State.FAILED},
    State.STOPPED: set(),
    State.FAILED: {State.STOPPED},
}


class Lifecycle:
    """The one owner of the state. Lives on the event loop."""

    def __init__(self) -> None:
        """Begin by loading."""
        self._state = State.LOADING

    @property
    def state(self) -> State:
        """The state now."""
        return self._state

    def become(self, state: State) -> None:
        """Move on; going to where we are is no move."""
        if state is self._state:
            return
        assert state in _NEXT[self._state], f"{self._state} does not lead to {state}"
        self._state = state

    def check_accepting(self) -> None:
        """Let new work in, or say why not.

        Raises:
            NotReadyError: The model is still loading.
            DrainingError: The daemon is finishing.
            EngineFaultError: The engine is gone.
        """
        match self._state:
            case State.READY:
                return
            case State.LOADING:
                raise NotReadyError("the model is still loading", retry_after_s=_RETRY_AFTER_S)
            case State.DRAINING | State.STOPPED:
                raise DrainingError("the server is shutting down", retry_after_s=_RETRY_AFTER_S)
            case State.FAILED:
                raise EngineFaultError("the engine has stopped; the server is restarting")
