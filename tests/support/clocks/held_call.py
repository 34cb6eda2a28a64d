"""A function's stand-in that waits: tests see what goes on meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from support.clocks.polling import CEILING_S


class HeldCall:
    """Calls the function as soon as ``may_go`` is set.

    As a context manager it sets ``may_go`` at the end, so that a test that fails leaves no thread waiting.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        """Hold every call of ``function``."""
        self._function = function
        self._is_reached = threading.Event()
        self.may_go = threading.Event()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Wait, then call the function."""
        self._is_reached.set()
        assert self.may_go.wait(CEILING_S), "a test forgot to let its call go"
        return self._function(*args, **kwargs)

    def as_method(self) -> Callable[..., Any]:
        """The same for a class's attribute, which gets its object as the first argument."""

        def call(*args: Any, **kwargs: Any) -> Any:
            return self(*args, **kwargs)

        return call

    def __enter__(self) -> HeldCall:
        """Nothing to do."""
        return self

    def __exit__(self, *_: object) -> None:
        """Let all calls go."""
        self.may_go.set()

    def wait_until_reached(self) -> None:
        """Wait for the first call."""
        assert self._is_reached.wait(CEILING_S), "the function was not called"
