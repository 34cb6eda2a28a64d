"""Deadlines for probes, checked before every engine step and every forward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from machd.clock import Clock
from machd.engine.protocol.engine import Engine
from machd.engine.protocol.forwarding import ForwardingEngine
from machd.engine.protocol.step import StepPlan, StepResult

Watch: TypeAlias = Callable[[], None]
"""Called before anything is computed; raises to have nothing more computed."""


class OutOfTimeError(Exception):
    """A probe took longer than it may. Says nothing of the model."""


def without_end() -> None:
    """A :data:`Watch` that lets a probe take as long as it likes."""


class Deadline:
    """A :data:`Watch` that ends at a moment. What is under way then is finished."""

    def __init__(self, clock: Clock, *, max_s: float) -> None:
        """Begin to count now.

        Args:
            clock: Reads time.
            max_s: Seconds after which every call raises.
        """
        self._clock = clock
        self._max_s = max_s
        self._end_s = clock.monotonic_s() + max_s

    @property
    def is_over(self) -> bool:
        """Return whether the deadline has passed."""
        return self._clock.monotonic_s() > self._end_s

    def __call__(self) -> None:
        """Check the deadline.

        Raises:
            OutOfTimeError: There is no time left.
        """
        if self.is_over:
            raise OutOfTimeError(f"there was no time for it within {self._max_s:g} s")


class ReplaceableWatch:
    """A watch in place of another one, so that an engine need not know its subject."""

    def __init__(self, watch: Watch) -> None:
        """Begin with ``watch``."""
        self.watch = watch

    def __call__(self) -> None:
        """Call the watch in force."""
        self.watch()


class WatchedEngine(ForwardingEngine):
    """Another engine, with a watch before each step."""

    def __init__(self, engine: Engine, watch: Watch) -> None:
        """Wrap an engine."""
        super().__init__(engine)
        self._watch = watch

    def run(self, plan: StepPlan) -> StepResult:
        """Compute one step, if the watch lets it."""
        self._watch()
        return super().run(plan)
