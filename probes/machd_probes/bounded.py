"""An engine that stops answering when a probe's time is over."""

from __future__ import annotations

from machd.clock import Clock
from machd.engine.protocol import (
    Engine,
    GrammarCompiler,
    MemoryReading,
    ModelDescription,
    StepPlan,
    StepResult,
    Tokenizer,
)

__all__ = ["BoundedEngine", "OutOfTimeError"]


class OutOfTimeError(Exception):
    """A probe took longer than it may. Says nothing of the model."""


class BoundedEngine:
    """Another engine, up to a moment. A step that is under way then is finished."""

    def __init__(self, engine: Engine, clock: Clock, *, max_s: float) -> None:
        """Begin to count now.

        Args:
            engine: What is asked.
            clock: Reads time.
            max_s: Seconds after which every step raises.
        """
        self._engine = engine
        self._clock = clock
        self._max_s = max_s
        self._end_s = clock.monotonic_s() + max_s

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
        """Compute one step.

        Raises:
            OutOfTimeError: There is no time left.
        """
        if self._clock.monotonic_s() > self._end_s:
            raise OutOfTimeError(f"there was no time for it within {self._max_s:g} s")
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
