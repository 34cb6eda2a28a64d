"""Logs and states of a failing test's daemons.

Daemons of a test's own ``with`` blocks have ended before pytest reports its failure, so each adds a
note to the error that leaves its block. Daemons of fixtures still run, and pytest asks them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import httpx

_LOG_LINES = 40
_ANSWER_TIMEOUT_S = 5.0
_STATE = ("machd_slots", "machd_requests_running", "machd_requests_waiting")
"""Beginnings of the metrics that say what a daemon is doing."""


class ReportedDaemon(Protocol):
    """A daemon that can be asked, and whose log is kept."""

    @property
    def url(self) -> str:
        """The address it listens on; empty until it is ready."""

    def log_tail(self, lines: int) -> Sequence[str]:
        """The last lines of its log; none where pytest captures them itself."""


_running: list[ReportedDaemon] = []


@contextmanager
def reported(daemon: ReportedDaemon) -> Iterator[None]:
    """Add what ``daemon`` logged and its state to every error that leaves this block."""
    _running.append(daemon)
    try:
        yield
    except Exception as error:
        error.add_note(_report(daemon))
        raise
    finally:
        _running.remove(daemon)


def daemon_reports() -> list[str]:
    """A report of every daemon that runs now, in the order in which they were started."""
    return [_report(daemon) for daemon in _running]


def _report(daemon: ReportedDaemon) -> str:
    lines = [f"The daemon at {daemon.url or 'no address yet'}:"]
    lines += [f"  {line}" for line in _state(daemon.url)] if daemon.url else []
    lines += [f"  log: {line.rstrip()}" for line in daemon.log_tail(_LOG_LINES)]
    return "\n".join(lines)


def _state(url: str) -> Iterator[str]:
    try:
        health = httpx.get(f"{url}/health", timeout=_ANSWER_TIMEOUT_S)
        yield f"/health: {health.status_code} {health.text}"
        metrics = httpx.get(f"{url}/metrics", timeout=_ANSWER_TIMEOUT_S).text
        yield from (line for line in metrics.splitlines() if line.startswith(_STATE))
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        yield f"does not answer: {error!r}"
