"""A model's vision encoder in stages, so that other rows may move while an image is encoded.

mlx computes nothing until a result is evaluated. So the encoder is called once, which takes no time, and the outputs of its modules are
evaluated one after the other: what is computed between two of them is a stage.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import mlx.core as mx

from machd.engine.backend.untyped import Layer

_recorded: deque[mx.array] | None = None
"""Outputs of recording modules in the order of computation, while an encoder is called; the engine thread's alone."""


def record_outputs(modules: Iterable[Layer]) -> None:
    """Let modules record what they give while :func:`recording` is entered.

    Python looks ``__call__`` up in the class, so each module gets a subclass of its class.
    """
    for module in modules:
        kind: Any = type(module)
        module.__class__ = _recording_class(kind)


@contextmanager
def recording() -> Iterator[deque[mx.array]]:
    """Yield the outputs of all modules that are called inside, lazy, in the order of computation."""
    global _recorded  # noqa: PLW0603 - modules have no other way to it
    _recorded = deque()
    try:
        yield _recorded
    finally:
        _recorded = None


@cache
def _recording_class(kind: Any) -> Any:  # noqa: ANN401 - a class of mlx's
    class Recording(kind):  # type: ignore[misc]
        """The module's class, whose output is recorded."""

        def __call__(self, *args: object, **named: object) -> object:
            output: object = super().__call__(*args, **named)
            if _recorded is not None and isinstance(output, mx.array):
                _recorded.append(output)
            return output

    Recording.__name__, Recording.__qualname__ = kind.__name__, kind.__qualname__
    Recording.__module__ = kind.__module__
    return Recording
