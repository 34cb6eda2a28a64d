"""The time between two steps in which layers get the adapters that rows wait for."""

from __future__ import annotations

from machd.engine.protocol.adapters import AdapterRoom

_SHARE = 0.2
"""Of the last step's time. Chosen: a step beside prompts is longer by more."""

_LEAST_S, _MOST_S = 0.002, 0.05
"""Bounds of that time: a load of 200 layers ends within a hundred steps, and no step of a long prompt allows a long pause."""


class AdapterLoading:
    """Lets layers get adapters between steps, for no longer than the rows that run can wait.

    Attributes:
        has_more: Whether some layer still has to get one.
    """

    def __init__(self, room: AdapterRoom) -> None:
        """Begin before the first step."""
        self._room = room
        self._step_s = 0.0
        self.has_more = False

    def observe_step(self, duration_s: float) -> None:
        """Note how long a step took."""
        self._step_s = duration_s

    def go_on(self, *, is_at_rest: bool) -> None:
        """Go on with the next layers; while nothing runs, nobody waits for a step."""
        allowed_s = _MOST_S if is_at_rest else min(max(_SHARE * self._step_s, _LEAST_S), _MOST_S)
        self.has_more = self._room.load(allowed_s)
