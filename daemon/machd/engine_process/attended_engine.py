"""An engine under measurement: waiting requests are attended to between its steps."""

from __future__ import annotations

from collections.abc import Callable

from machd.engine.protocol.engine import Engine
from machd.engine.protocol.forwarding import ForwardingEngine
from machd.engine.protocol.step import StepPlan, StepResult


class Interruption(BaseException):
    """The measurement is over before its end.

    No Exception: a probe takes those for the model's, and would find it wanting. The cause is what
    went wrong between two steps; None where the measurement was just told to end.
    """


class AttendedEngine(ForwardingEngine):
    """Another engine, which calls back before each step."""

    def __init__(self, engine: Engine, attend: Callable[[], None]) -> None:
        """Wrap an engine.

        Args:
            engine: What is asked.
            attend: Called on the engine thread before each step. May raise :class:`Interruption`;
                whatever else it raises becomes the cause of one.
        """
        super().__init__(engine)
        self._attend = attend

    def run(self, plan: StepPlan) -> StepResult:
        """Look after others, then compute one step.

        Raises:
            Interruption: There is to be no other step.
        """
        try:
            self._attend()
        except Exception as error:
            raise Interruption from error
        return super().run(plan)
