"""What xdist runs in a forked worker: as ``xdist.remote`` does, but with a session that is collected."""

from __future__ import annotations

import os
from typing import Any

import execnet
import pytest
from _pytest.tmpdir import TempPathFactory
from xdist import remote

from support.forked_workers import capturing, collected


class _Worker(remote.WorkerInteractor):  # type: ignore[misc]  # xdist is untyped
    """Tells of each test its end and what is worth a line: of six messages a test, four say nothing."""

    def pytest_runtest_logstart(self, nodeid: str, location: object) -> None:
        """Say nothing."""

    def pytest_runtest_logfinish(self, nodeid: str, location: object) -> None:
        """Say nothing."""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Say what a terminal shows."""
        if report.when == "call" or not report.passed:
            super().pytest_runtest_logreport(report)


def work(channel: execnet.Channel) -> None:
    """Run the tests that xdist names, of those that were collected."""
    worker_input, _, options, _ = channel.receive()
    os.environ["PYTEST_XDIST_TESTRUNUID"] = worker_input["testrunuid"]
    os.environ["PYTEST_XDIST_WORKER"] = worker_input["workerid"]
    os.environ["PYTEST_XDIST_WORKER_COUNT"] = str(worker_input["workercount"])
    found = collected()
    session = found.session
    config: Any = session.config
    remote.setup_config(config, options.get("basetemp"))
    config.workerinput, config.workeroutput = worker_input, {}
    config._tmp_path_factory = TempPathFactory.from_config(config, _ispytest=True)
    capturing(config).start_global_capturing()
    worker = _Worker(config, channel)
    vars(remote)["interactor"] = worker
    worker.pytest_sessionstart(session)
    for warning in found.warnings:
        worker.pytest_warning_recorded(**warning)
    for report in found.reports:
        worker.pytest_collectreport(report)
    worker.pytest_collection_finish(session)
    try:
        worker.pytest_runtestloop(session)
        code = pytest.ExitCode.TESTS_FAILED if session.testsfailed else pytest.ExitCode.OK
    except (KeyboardInterrupt, pytest.exit.Exception):
        code = pytest.ExitCode.INTERRUPTED
    config.hook.pytest_sessionfinish(session=session, exitstatus=code)
    config._ensure_unconfigure()


if __name__ == "__channelexec__":
    work(channel)  # type: ignore[name-defined]  # noqa: F821 - execnet's
