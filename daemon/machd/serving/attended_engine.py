"""An engine under measurement: between its steps, whoever waits for the daemon is looked after."""

from __future__ import annotations

from collections.abc import Callable

from machd.engine.protocol import (
    Engine,
    GrammarCompiler,
    MemoryReading,
    ModelDescription,
    StepPlan,
    StepResult,
    Tokenizer,
)

__all__ = ["AttendedEngine", "Interruption"]


class Interruption(BaseException):
    """The measurement is over before its end.

    No Exception: a probe takes those for the model's, and would find it wanting. The cause is what
    went wrong between two steps; None where somebody just wants the measurement to end.
    """


class AttendedEngine:
    """Another engine, which calls back before each step."""

    def __init__(self, engine: Engine, attend: Callable[[], None]) -> None:
        """Wrap an engine.

        Args:
            engine: What is asked.
            attend: Called on the engine thread before each step. May raise :class:`Interruption`;
                whatever else it raises becomes the cause of one.
        """
        self._engine = engine
        self._attend = attend

    @property
    def model(self) -> ModelDescription:
        """What is loaded."""
        return self._engine.model

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._engine.tokenizer

    @property
    def grammars(self) -> GrammarCompiler:
        """The engine's own."""
        return self._engine.grammars

    def run(self, plan: StepPlan) -> StepResult:
        """Look after others, then compute one step.

        Raises:
            Interruption: There is to be no other step.
        """
        try:
            self._attend()
        except Exception as error:
            raise Interruption from error
        return self._engine.run(plan)

    def memory(self) -> MemoryReading:
        """Bytes right now."""
        return self._engine.memory()

    def reset(self, *, max_rows: int | None = None) -> None:
        """Forget every slot."""
        self._engine.reset(max_rows=max_rows)

    def close(self) -> None:
        """Give back weights and caches."""
        self._engine.close()
