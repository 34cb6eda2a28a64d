"""Work that starts processes and makes directories, and leaves neither behind when it is told to end.

SIGTERM, SIGHUP and SIGINT cancel the work, which then ends as after an error: each part stops what it
has started. Python alone would die of the first two at once, and of the third wherever it is.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Coroutine
from typing import TypeVar

import click

from machd.errors import MachdError

_Result = TypeVar("_Result")

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SIGNALLED = 128
"""What a shell adds to a signal's number to get an exit code."""


def run_stoppable(work: Coroutine[object, object, _Result]) -> _Result:
    """Run to the end, or to that of its cleaning up after a signal.

    A signal that was ignored before, as SIGHUP is under nohup, stays ignored. Outside of the main
    thread nothing is changed about signals.

    Raises:
        click.exceptions.Exit: A signal came; the code is 128 and its number.
    """
    received: list[signal.Signals] = []
    try:
        return asyncio.run(_cancelled_by_signals(work, received))
    except (asyncio.CancelledError, MachdError, OSError):
        # A terminal sends its signals to the servers as well, so work may fail before it is cancelled.
        if not received:
            raise
        raise click.exceptions.Exit(_SIGNALLED + received[0]) from None


async def _cancelled_by_signals(
    work: Coroutine[object, object, _Result], received: list[signal.Signals]
) -> _Result:
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None, "in a coroutine"

    def stop(number: signal.Signals) -> None:
        received.append(number)
        task.cancel()

    is_main = threading.current_thread() is threading.main_thread()
    heeded = [one for one in _SIGNALS if is_main and signal.getsignal(one) is not signal.SIG_IGN]
    for one in heeded:
        loop.add_signal_handler(one, stop, one)
    try:
        return await work
    finally:
        for one in heeded:
            loop.remove_signal_handler(one)
