"""The entry point of ``machd``: signal handlers first, then the command line.

Importing the daemon's libraries takes seconds, and a supervisor may stop the process meanwhile. So
this module imports next to nothing before its handlers are installed.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType


def main() -> None:
    """Run the command line; the exit codes are those of the contract."""
    if sys.argv[1:2] == ["serve"]:
        _handle_early_signals()
    from machd.cli.commands import leave, run  # noqa: PLC0415 - see the module's docstring

    leave(run())


def _handle_early_signals() -> None:
    """Handle signals until the daemon does: a stop ends the process, a reload stays pending."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _exit_at_once)
    # Threads inherit the mask, so that the signal waits for the daemon's own handler.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})


def _exit_at_once(_number: int, _frame: FrameType | None) -> None:
    """Exit in the middle of an import: no address is bound yet and no file written."""
    os._exit(0)
