"""An engine process that allocates beyond its limit on memory as soon as it is told to.

machd looks at such a limit before each step, and refuses what does not fit: a limit alone ends no process. Here the limit and
the allocation come together, in a signal's handler. Nothing else of the process is a test's.
"""

from __future__ import annotations

import signal
from types import FrameType

import psutil

BEYOND_LIMIT = signal.SIGUSR1 if psutil.LINUX else signal.SIGABRT
"""The signal that tells the process to. Only Linux enforces such a limit; elsewhere the process is aborted."""

_ALLOCATED_BYTES = 1 << 30

TOLD = {"TESTS_BEYOND_LIMIT": "1"}
"""Variables of a daemon whose engine processes have the handler, which those have that are forked."""


def install() -> None:
    """Have this process allocate beyond its limit when the signal comes."""
    if psutil.LINUX:
        signal.signal(BEYOND_LIMIT, _allocate)


def _allocate(_number: int, _frame: FrameType | None) -> None:
    """Let the process take no more than it has, and have mlx take more: it writes to what malloc did not return."""
    import mlx.core as mx  # noqa: PLC0415 - once the process has it

    mx.eval(mx.zeros(1))  # the thread that allocates for this one has begun
    this = psutil.Process()
    _, hard = this.rlimit(psutil.RLIMIT_AS)
    this.rlimit(psutil.RLIMIT_AS, (this.memory_info().vms, hard))
    mx.eval(mx.ones(_ALLOCATED_BYTES, mx.uint8))
