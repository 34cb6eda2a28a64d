"""A gate in front of an engine's steps: tests hold the engine at a point and let it go."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Self

from machd.engine.protocol.step import StepPlan
from support.clocks.polling import CEILING_S, wait_until


def at_prefill(plan: StepPlan) -> bool:
    """Return whether the step computes prompt tokens."""
    return bool(plan.prefill)


def at_decode(plan: StepPlan) -> bool:
    """Return whether the step continues a completion."""
    return bool(plan.decode)


class StepGate:
    """``FakeEngine(before_step=gate)``. Leaving it as a context manager opens it for good.

    Enter it inside the daemon's own context, so that it opens before the daemon stops::

        with RunningDaemon(lambda: FakeEngine(before_step=gate)) as daemon, gate:
    """

    def __init__(self, holds: Callable[[StepPlan], bool] = lambda _plan: True) -> None:
        """Hold every step for which ``holds`` is true."""
        self._holds = holds
        self._changed = threading.Condition()
        self._is_open = False
        self._permits = 0
        self._held: StepPlan | None = None
        self.step_count = 0
        self.prefill_count = 0

    def __enter__(self) -> Self:
        """Nothing to do."""
        return self

    def __exit__(self, *_: object) -> None:
        """Let the engine go."""
        self.open()

    def __call__(self, plan: StepPlan) -> None:
        """Called by the engine at the start of a step."""
        with self._changed:
            self.step_count += 1
            self.prefill_count += bool(plan.prefill)
            if self._is_open or not self._holds(plan):
                return
            self._held = plan
            self._changed.notify_all()
            is_free = self._changed.wait_for(lambda: self._is_open or self._permits > 0, CEILING_S)
            assert is_free, "a test forgot to open its gate"
            self._permits = max(0, self._permits - 1)
            self._held = None

    def wait_until_held(self) -> StepPlan:
        """Wait until the engine stands at the gate; returns the step it is about to compute."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._held is not None, CEILING_S), (
                f"the engine did not come to the gate; it has begun {self.step_count} steps, "
                f"{self.prefill_count} of them with prompt tokens"
            )
            assert self._held is not None, "just waited for"
            return self._held

    def let(self) -> None:
        """Let the held step go; the next one is held again."""
        with self._changed:
            if self._held is not None:
                self._permits += 1
                self._held = None
                self._changed.notify_all()

    def open(self) -> None:
        """Hold nothing from now on."""
        with self._changed:
            self._is_open = True
            self._changed.notify_all()

    def step_until(self, condition: Callable[[], bool], what: str) -> None:
        """Let steps go one at a time until ``condition`` holds; the engine is held again then."""

        def is_reached() -> bool:
            if condition():
                return True
            self.let()
            return False

        wait_until(is_reached, what)
