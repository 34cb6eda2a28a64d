"""An engine that stops answering when a probe's time is over."""

from __future__ import annotations

from machd.clock import Clock
from machd.engine.forwarding import ForwardingEngine
from machd.engine.protocol import Engine, StepPlan, StepResult

__all__ = ["BoundedEngine", "OutOfTimeError"]


class OutOfTimeError(Exception):
    """A probe took longer than it may. Says nothing of the model."""


class BoundedEngine(ForwardingEngine):
    """Another engine, up to a moment. A step that is under way then is finished."""

    def __init__(self, engine: Engine, clock: Clock, *, max_s: float) -> None:
        """Begin to count now.

        Args:
            engine: What is asked.
            clock: Reads time.
            max_s: Seconds after which every step raises.
        """
        super().__init__(engine)
        self._clock = clock
        self._max_s = max_s
        self._end_s = clock.monotonic_s() + max_s

    def run(self, plan: StepPlan) -> StepResult:
        """Compute one step.

        Raises:
            OutOfTimeError: There is no time left.
        """
        if self._clock.monotonic_s() > self._end_s:
            raise OutOfTimeError(f"there was no time for it within {self._max_s:g} s")
        return super().run(plan)
