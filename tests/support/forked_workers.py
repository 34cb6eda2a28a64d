"""xdist's workers, forked from a process that has collected the tests: else each worker would import and collect them.

The parent (:mod:`support.daemon.forking_parent`) runs pytest up to its loop over the tests; there it forks workers, which
go on with the collected session (:mod:`support.forked_worker`).
"""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any, NoReturn

import execnet
import pytest


def fork_workers(specs: Iterable[execnet.XSpec]) -> None:
    """Have these workers forked, where a program of :mod:`support.daemon.forked_programs` is."""
    for one in specs:
        one.python = shlex.join((sys.executable, "-m", "support.forked_workers"))


class Collected:
    """What pytest has collected in this process, of which workers are forked.

    Attributes:
        session: With its tests.
        reports: Of files that cannot be collected, among others.
        warnings: That collecting gave.
    """

    session: pytest.Session

    def __init__(self, serve: Callable[[], None]) -> None:
        self._serve = serve
        self.reports: list[pytest.CollectReport] = []
        self.warnings: list[dict[str, Any]] = []

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Keep it."""
        self.reports.append(report)

    def pytest_warning_recorded(
        self, warning_message: Any, when: str, nodeid: str, location: Any
    ) -> None:
        """Keep it."""
        told = {"warning_message": warning_message, "when": when}
        self.warnings.append(told | {"nodeid": nodeid, "location": location})

    def pytest_internalerror(self, excrepr: object) -> None:
        """Write the error to stderr; this process's standard output is read by nobody."""
        print(excrepr, file=sys.stderr)  # noqa: T201 - as pytest does

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> NoReturn:
        """Fork workers in place of running tests."""
        self.session = session
        session.config.pluginmanager.unregister(self)
        capturing(session.config).stop_global_capturing()
        sys.stdout = sys.__stdout__  # of what is forked
        self._serve()
        os._exit(0)


_collected: Collected


def collected() -> Collected:
    """Return what this worker was forked with."""
    return _collected


def serve_collected(arguments: Sequence[str], serve: Callable[[], None]) -> None:
    """Collect the tests that pytest finds with these arguments, and ``serve``, which forks workers."""
    global _collected  # noqa: PLW0603 - of this process, and of those that are forked
    _collected = Collected(serve)
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):  # noqa: PTH123 - no file
        pytest.main([*arguments, "--numprocesses=0"], plugins=[_collected])


def main() -> None:
    """Be a worker: read what to run, as the interpreter does that execnet starts."""
    program = sys.modules["__main__"] = ModuleType("__main__")
    exec(eval(sys.stdin.readline()), vars(program))  # noqa: S307, S102 - what execnet sends


def capturing(config: pytest.Config) -> Any:
    """Return what captures the output of tests, of this process's own."""
    return config.pluginmanager.getplugin("capturemanager")
