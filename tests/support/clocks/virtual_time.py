"""An event loop with virtual time: a sleep ends as soon as nothing else can run."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import ParamSpec

_IN_FLIGHT_S = 0.001
"""Real time for data on loopback to arrive before virtual time moves on to the next timer."""

Params = ParamSpec("Params")


class LoopClock:
    """The virtual time of the running event loop."""

    def monotonic_s(self) -> float:
        """Seconds since the loop began."""
        return asyncio.get_running_loop().time()

    def unix_s(self) -> float:
        """The same."""
        return self.monotonic_s()


def in_virtual_time(
    test: Callable[Params, Coroutine[object, object, None]],
) -> Callable[Params, None]:
    """Run an asynchronous test on an event loop of its own with virtual time.

    Client and server have to run on that loop: virtual time does not wait for other threads.
    """

    @wraps(test)
    def run(*args: Params.args, **kwargs: Params.kwargs) -> None:
        with asyncio.Runner(loop_factory=_VirtualTimeLoop) as runner:
            runner.run(test(*args, **kwargs))

    return run


class _Selector(selectors.DefaultSelector):
    """Moves virtual time to the next timer when no socket is ready."""

    passed_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            return super().select(None)
        ready = super().select(min(timeout, _IN_FLIGHT_S))
        if not ready:
            self.passed_s += max(timeout, 0.0)
        return ready


class _VirtualTimeLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.passed_s
