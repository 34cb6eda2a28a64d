"""The engine process of a daemon that runs, as the system shows it."""

from __future__ import annotations

import psutil

_PROGRAM = "machd.cli.engine"


def engine_of(process_id: int) -> psutil.Process:
    """Return the engine process that computes for a front.

    Raises:
        StopIteration: There is none at this moment.
    """
    children = psutil.Process(process_id).children()
    return next(one for one in children if _PROGRAM in one.cmdline())
