"""The life of a process on any rank but rank 0: it has no HTTP and runs the orders of rank 0."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError

import structlog

from machd.clock import Clock
from machd.errors import EngineFaultError, MachdError

_LOOK_INTERVAL_S = 0.5

_LAST_SIGNAL = 2
"""Stops asked for at which the process leaves without waiting for rank 0."""


class Follower:
    """Runs the orders of rank 0 on a thread of their own, and watches that thread."""

    def __init__(
        self, run: Callable[[Callable[[], None]], None], *, stall_timeout_s: float, clock: Clock
    ) -> None:
        """Prepare; nothing runs yet.

        Args:
            run: Loads the shard and follows to the end; is given what to call at each order.
            stall_timeout_s: How long rank 0 may order nothing, once it has begun to.
            clock: Reads time.
        """
        self._run = run
        self._stall_timeout_s = stall_timeout_s
        self._clock = clock
        self._log = structlog.get_logger("machd.daemon")
        self._ordered_s: float | None = None
        self._finished: Future[None] = Future()
        self._stops = 0

    def run(self) -> None:
        """Follow rank 0 to its end; a stop is left to it, so that requests can finish.

        Raises:
            MachdError: The shard could not be loaded, or rank 0 or another rank is lost.
        """
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._take_stop)
        threading.Thread(target=self._main, name="machd-engine", daemon=True).start()
        while self._stops < _LAST_SIGNAL:
            try:
                self._finished.result(timeout=_LOOK_INTERVAL_S)
            except FutureTimeoutError:
                self._check_stall()
            else:
                break
        self._log.info("daemon.stopped")

    def _main(self) -> None:
        try:
            self._run(self._take_order)
        except MachdError as error:
            self._finished.set_exception(error)
        except BaseException as error:  # noqa: BLE001 - the main thread ends the process
            self._log.critical("engine.stopped", error=type(error).__name__, exc_info=error)
            fault = EngineFaultError("the ranks cannot go on together; the log says why")
            self._finished.set_exception(fault)
        else:
            self._finished.set_result(None)

    def _take_order(self) -> None:
        self._ordered_s = self._clock.monotonic_s()

    def _check_stall(self) -> None:
        if self._ordered_s is None:
            return
        age_s = self._clock.monotonic_s() - self._ordered_s
        if age_s > self._stall_timeout_s:
            self._log.critical("engine.stalled", heartbeat_age_s=round(age_s, 1))
            raise EngineFaultError("rank 0 orders nothing any more")

    def _take_stop(self, _number: int, _frame: object) -> None:
        self._stops += 1
