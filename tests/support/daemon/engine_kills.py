"""Ends of a daemon's engine process at random moments, while it makes answers."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from http import HTTPStatus

import psutil

from support.clients.raw_client import RawClient
from support.clocks.polling import CEILING_S, wait_until
from support.daemon.beyond_limit import BEYOND_LIMIT
from support.daemon.engine_processes import engine_of
from support.daemon.scraping import scrape
from support.daemon.serve_process import ServeProcess

WAYS = (signal.SIGKILL, signal.SIGSEGV, BEYOND_LIMIT, signal.SIGSTOP)
"""In turn. The last one ends nothing: the process hangs, and the front ends it."""

_FIRST_WITHIN_S = 1.0
"""The longest time to the first end, or as long as all answers take undisturbed."""

_LOAD_KILLED_WITHIN_S = 0.5
"""Shorter than any model takes to load."""

_LOOK_INTERVAL_S = 0.1
"""Between two looks at a process that loads, which needs the processor."""

_LOADS_KILLED = 0.5
"""The share of ends after which the process that loads instead is ended, too."""

_ANSWERS_BETWEEN = (2, 6)
"""Whole answers between two ends: few enough for several ends, and enough for them to come until the last answers."""

_FEW = 3
"""Open answers at which it is over: one that runs alone at two ends is to blame for them."""


class EngineKills:
    """Ends the engine process of one daemon, again and again.

    Attributes:
        count: Ends so far.
    """

    def __init__(self, server: ServeProcess, *, seed: int, max_pause_s: float) -> None:
        """Begin with none.

        Args:
            server: The daemon; its engine processes allocate when told to, see :mod:`support.daemon.beyond_limit`.
            seed: Of the moments.
            max_pause_s: The longest time from when a process may be ended to its end.
        """
        self.count = 0
        self._turn = 0
        self._server = server
        self._random = random.Random(seed)
        self._max_pause_s = max_pause_s
        self._restarts_before = self._restarts()

    @property
    def restarts(self) -> float:
        """Ends that the daemon has counted since."""
        return self._restarts() - self._restarts_before

    def disturb(
        self, answers: Sequence[Future[object]], most: int, *, undisturbed_s: float
    ) -> None:
        """End processes while answers are made, until few are open or so many have ended.

        The first one ends wherever the requests are: read, encoded, queued, prefilled or decoded. A further one does
        when some answers more are whole, because processes that end one after the other without one are a fault.

        Args:
            answers: All that were asked for just now.
            most: Processes that may end.
            undisturbed_s: How long answers like these take when no process ends.
        """
        last = self.count + most
        time.sleep(self._random.random() * min(_FIRST_WITHIN_S, undisturbed_s))
        assert _whole(answers) < len(answers), "the first end is while answers are made"
        self.end_one()
        while self.count < last:
            wanted = _whole(answers) + self._random.randint(*_ANSWERS_BETWEEN)
            wait_until(
                lambda: (_whole(answers) >= wanted and self._run_together()) or _is_over(answers),  # noqa: B023
                "more answers are whole",
            )
            if _is_over(answers):
                return
            is_load_killed = last - self.count > 1 and self._random.random() < _LOADS_KILLED
            self.end_one(self._random.random() * self._max_pause_s, is_load_killed=is_load_killed)

    def end_one(self, pause_s: float = 0.0, *, is_load_killed: bool = False) -> None:
        """End the process in the next way, and wait until another one serves."""
        time.sleep(pause_s)
        process = engine_of(self._server.process.pid)
        process.send_signal(WAYS[self._turn % len(WAYS)])
        self._turn += 1
        self.count += 1
        if is_load_killed:
            wait_until(lambda: self._has_another(process), "another one loads")
            time.sleep(self._random.random() * _LOAD_KILLED_WITHIN_S)
            process = engine_of(self._server.process.pid)
            process.send_signal(signal.SIGKILL)
            self.count += 1
        wait_until(lambda: self._serves_again(process), "another one serves")

    def _serves_again(self, former: psutil.Process) -> bool:
        time.sleep(_LOOK_INTERVAL_S)
        return self._is_ready() and self._has_another(former)

    def _is_ready(self) -> bool:
        with RawClient(self._server.url) as client:
            client.request("GET", "/health/ready")
            return client.read_answer().status == HTTPStatus.OK

    def _has_another(self, former: psutil.Process) -> bool:
        """Another process is there; the daemon says that one is replaced before it starts another."""
        try:
            return bool(engine_of(self._server.process.pid).pid != former.pid)
        except (StopIteration, psutil.NoSuchProcess):
            return False

    def _run_together(self) -> bool:
        """Several rows are decoded: no suspect runs alone any more, which would be to blame for the next end."""
        return scrape(self._server.url, "machd_active_loops") > 1

    def _restarts(self) -> float:
        counted = ("exit", "stall")
        return sum(
            scrape(self._server.url, "machd_engine_restarts_total", reason=one) for one in counted
        )


def assert_answers_stay(
    killed: EngineKills,
    ask: Callable[[], list[Future[object]]],
    kills: int,
    *,
    are_caches_cold: bool = False,
) -> list[object]:
    """Answers are those of a daemon left alone, however often its engine process ends, and each end is counted.

    There may be more: on a busy machine a process may seem to hang.

    Args:
        killed: Ends the process.
        ask: Asks the same questions each time, all at once.
        kills: The number of ends.
        are_caches_cold: The process ends before the questions are asked, too, so that nothing of them is kept.

    Returns:
        The answers, in the order in which they are asked for.
    """
    begun_s = time.monotonic()
    expected = [one.result(CEILING_S) for one in ask()]
    undisturbed_s = time.monotonic() - begun_s
    while killed.count < kills:
        if are_caches_cold:
            killed.end_one()
        answers = ask()
        killed.disturb(answers, kills - killed.count, undisturbed_s=undisturbed_s)
        said = [one.result(CEILING_S) for one in answers]
        for number, (one, undisturbed) in enumerate(zip(said, expected, strict=True)):
            assert one == undisturbed, number
    assert killed.restarts >= killed.count
    return expected


def _whole(answers: Sequence[Future[object]]) -> int:
    return sum(one.done() for one in answers)


def _is_over(answers: Sequence[Future[object]]) -> bool:
    return len(answers) - _whole(answers) <= _FEW
