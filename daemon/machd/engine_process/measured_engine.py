"""An engine that a probe measures: messages are handled between its steps."""

from __future__ import annotations

from collections.abc import Callable

from machd.engine.protocol.engine import Engine
from machd.engine.protocol.forwarding import ForwardingEngine
from machd.engine.protocol.step import StepPlan, StepResult


class Interruption(BaseException):
    """A measurement that was stopped early.

    Not an Exception: a probe reports those as faults of the model. The cause is the error between
    two steps, or None if the measurement was told to stop.
    """


class MeasuredEngine(ForwardingEngine):
    """Another engine with a callback before each step."""

    def __init__(self, engine: Engine, before_step: Callable[[], None]) -> None:
        """Wrap an engine.

        Args:
            engine: The engine that computes the steps.
            before_step: Called on the engine thread before each step. May raise :class:`Interruption`;
                any other error becomes the cause of one.
        """
        super().__init__(engine)
        self._before_step = before_step

    def run(self, plan: StepPlan) -> StepResult:
        """Call back, then compute one step.

        Raises:
            Interruption: The callback raised.
        """
        try:
            self._before_step()
        except Exception as error:
            raise Interruption from error
        return super().run(plan)
