"""The engine process of a daemon that runs, as the system shows it."""

from __future__ import annotations

from contextlib import suppress

import psutil

from support.daemon.forked_programs import FORKED_ENGINE_NAME

_PROGRAM = "machd.cli.engine"


def engine_of(process_id: int) -> psutil.Process:
    """Return the engine process that computes for a front.

    Raises:
        StopIteration: There is none at this moment.
    """
    return next(iter(engines_of(process_id)))


def engines_of(process_id: int) -> list[psutil.Process]:
    """Return the engine processes that compute for a front at this moment."""
    return children_of(process_id, _PROGRAM, name=FORKED_ENGINE_NAME)


def children_of(process_id: int, argument: str, *, name: str = "") -> list[psutil.Process]:
    """Return a process's children with this argument or name, without those that have ended and wait to be asked for."""
    found = list[psutil.Process]()
    for one in psutil.Process(process_id).children():
        with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            if one.name() == name or argument in one.cmdline():
                found.append(one)
    return found
