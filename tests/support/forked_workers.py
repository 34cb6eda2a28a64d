"""xdist's workers, forked from a process that has imported the tests: else each worker would import all of them."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from collections.abc import Iterable, Sequence
from types import ModuleType

import execnet
import pytest


def fork_workers(specs: Iterable[execnet.XSpec]) -> None:
    """Have these workers forked, where a program of :mod:`support.daemon.forked_programs` is."""
    for one in specs:
        one.python = shlex.join((sys.executable, "-m", "support.forked_workers"))


def import_tests(arguments: Sequence[str]) -> None:
    """Import the tests that pytest finds with these arguments; each worker finds them again, without an import."""
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):  # noqa: PTH123 - no file
        pytest.main([*arguments, "--numprocesses=0", "--collect-only", "-qq"])


def main() -> None:
    """Be a worker: read what to run, as the interpreter does that execnet starts."""
    program = sys.modules["__main__"] = ModuleType("__main__")
    exec(eval(sys.stdin.readline()), vars(program))  # noqa: S307, S102 - what execnet sends
