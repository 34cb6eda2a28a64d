"""Panics of Rust libraries, which Python sees as a BaseException.

tokenizers and llguidance are Rust. Where their code gives up, pyo3 raises a ``PanicException`` that is
no ``Exception``, so that a handler of errors would let it pass and it would end whatever runs. At the
edge to such a library it becomes an error like any other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

ENDINGS = (asyncio.CancelledError, GeneratorExit, KeyboardInterrupt, SystemExit)
"""What is no failure, and has to pass: a task, a generator or the process is to end."""


class PanicError(Exception):
    """A library gave up in the middle of a call; ``__cause__`` is its own exception."""


@contextmanager
def panics_as_errors(library: str) -> Iterator[None]:
    """Raise an error in place of a panic; also a decorator.

    Raises:
        PanicError: The library panicked.
    """
    try:
        yield
    except (Exception, *ENDINGS):
        raise
    except BaseException as panic:
        raise PanicError(f"{library} panicked: {type(panic).__name__}") from panic
