"""Waiting for the daemon to have done what it was told, and saying what is waited for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Self

from rich.console import Console

from machd.admin.status import AdminStatus
from machd.cli.ctl_client import AdminClient
from machd.cli.ctl_text import plain, say
from machd.cli.progress import CountingBar
from machd.clock import SystemClock

_POLL_S = 0.2
_SAY_EVERY_S = 2.0


def wait_until(
    client: AdminClient,
    is_done: Callable[[AdminStatus], bool],
    what: Callable[[AdminStatus], str],
) -> AdminStatus:
    """Ask for the status until it is what is waited for.

    On a terminal a line shows what is waited for; elsewhere one is written every other second that
    it takes, when it says something new.

    ``is_done`` may raise what ends the wait otherwise; ``what`` says what is still waited for.

    Raises:
        NoDaemonError: The daemon has gone away meanwhile.
        UnavailableError: It is there and does not answer in time.
    """
    status = client.ask("GET", "/admin/status", AdminStatus)
    if is_done(status):
        return status
    console, clock = Console(stderr=True), SystemClock()
    said, said_s = "", clock.monotonic_s()
    with console.status(plain(what(status))) as shown:
        while True:
            time.sleep(_POLL_S)
            status = client.ask("GET", "/admin/status", AdminStatus)
            if is_done(status):
                return status
            text = what(status)
            shown.update(plain(text))
            is_due = clock.monotonic_s() - said_s >= _SAY_EVERY_S
            if not console.is_terminal and is_due and text != said:
                say(text, err=True)
                said, said_s = text, clock.monotonic_s()


class Countdown(CountingBar):
    """A bar that appears once the work takes longer than two seconds."""

    def __init__(self, what: str, *, total: int) -> None:
        """Count to ``total``; entering the context starts the clock."""
        super().__init__(what, total=total)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._show, name="machd-countdown", daemon=True)

    def __enter__(self) -> Self:
        """Start the clock."""
        self._thread.start()
        if self._lines is not None:
            self._lines.start()
        return self

    def stop(self) -> None:
        """Take the bar away."""
        self._ended.set()
        self._thread.join()
        super().stop()

    def _show(self) -> None:
        if not self._progress.disable and not self._ended.wait(_SAY_EVERY_S):
            self._progress.start()
