"""Reports to the service manager: state, signs of life and extended timeouts.

Signs of life are sent from the event loop while the engine's heartbeat is fresh, so neither a hung engine nor
a hung event loop can seem alive.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from machd.clock import Clock
from machd.process.configuration import Configuration
from machd.process.lifecycle import Lifecycle, State
from machd.process.notify import ServiceNotifier
from machd.served.throughput import Throughput

_STATUS_INTERVAL_S = 1.0

_LOADING_EXTENSION_S = 60.0
"""Time by which each message extends the start-up timeout; the next is sent long before it passes."""

_LOADING_INTERVAL_S = 10.0

_MAX_LOADING_S = 3600.0
"""Time of loading after which the start-up timeout is not extended any more."""

_LEAVING_S = 20.0
"""Time after the drain for last answers, and for the servers and the engine to end."""


class EngineCounts(Protocol):
    """Counts of all engines together."""

    @property
    def running_count(self) -> int:
        """Sequences that run."""
        ...

    @property
    def waiting_count(self) -> int:
        """Sequences that wait."""
        ...

    @property
    def slot_count(self) -> int:
        """Sequences that can run at once."""
        ...

    @property
    def heartbeat_age_s(self) -> float:
        """The longest time for which an engine has given no sign of life."""
        ...


class ServiceReport:
    """Watches the daemon and reports. Lives on the event loop."""

    def __init__(  # noqa: PLR0913 - what is reported, each by its name
        self,
        notifier: ServiceNotifier,
        *,
        configuration: Configuration,
        lifecycle: Lifecycle,
        models: EngineCounts,
        open_requests: Callable[[], int],
        throughput: Throughput,
        clock: Clock,
    ) -> None:
        """Report to ``notifier``; nothing is sent yet."""
        self._notifier = notifier
        self._configuration = configuration
        self._lifecycle = lifecycle
        self._models = models
        self._open_requests = open_requests
        self._throughput = throughput
        self._clock = clock
        self._is_ready = False
        self._is_stopping = False
        self._started_s = clock.monotonic_s()
        self._status = ""
        self._status_s = self._alive_s = self._loading_s = float("-inf")

    async def watch(self) -> None:
        """Report until cancelled; returns at once without a service manager."""
        while self._notifier.is_heard:
            self.look()
            await asyncio.sleep(self._rest_s)

    def look(self) -> None:
        """Send the messages that are due."""
        if not (self._is_ready or self._is_stopping):
            self._say_loading()
        self._say_alive()
        self._say_status()

    def ready(self) -> None:
        """Report that requests are answered."""
        self._is_ready = True
        self._notifier.ready(self._noted_status())
        self._say_alive()

    def reloading(self) -> None:
        """Report that settings are being reloaded; :meth:`reloaded` follows."""
        if self._takes_reloads:
            self._notifier.reloading()

    def reloaded(self) -> None:
        """Report that the reload has ended, successful or not."""
        if self._takes_reloads:
            self._notifier.ready(self._noted_status())

    def stopping(self) -> None:
        """Report that the daemon shuts down, with the time for its notice and for open requests."""
        self._is_stopping = True
        limits = self._configuration.settings.limits
        timeout_s = limits.drain_notice_s + limits.drain_timeout_s + _LEAVING_S
        self._notifier.stopping(timeout_s=timeout_s, status=self._noted_status())

    @property
    def status(self) -> str:
        """Return the daemon's state in one line."""
        match self._lifecycle.state:
            case State.LOADING:
                return "loading the model"
            case State.READY:
                return self._counts + self._reload_problem
            case State.RESTARTING:
                return f"replacing the engine process, {self._counts}"
            case State.LEAVING:
                return f"leaving, {self._counts}"
            case State.DRAINING:
                count = self._open_requests()
                return f"draining, {count} {'request' if count == 1 else 'requests'} open"
            case State.FAILED:
                return "the engine has stopped"
            case State.STOPPED:
                return "stopped"

    @property
    def _takes_reloads(self) -> bool:
        """Return whether the service manager takes reloads: not while the daemon starts or stops."""
        return self._is_ready and not self._is_stopping

    @property
    def _counts(self) -> str:
        now = self._models
        return (
            f"{now.running_count} of {now.slot_count} slots, {now.waiting_count} waiting, "
            f"{self._throughput.tokens_per_s:.0f} tokens/s"
        )

    @property
    def _reload_problem(self) -> str:
        last = self._configuration.last_change
        return "" if last.is_successful else f"; the last {last.kind} was refused, see the log"

    @property
    def _rest_s(self) -> float:
        interval_s = self._notifier.watchdog_interval_s
        return min(_STATUS_INTERVAL_S, interval_s / 4) if interval_s else _STATUS_INTERVAL_S

    def _say_loading(self) -> None:
        now_s = self._clock.monotonic_s()
        is_due = now_s - self._loading_s >= _LOADING_INTERVAL_S
        if is_due and now_s - self._started_s <= _MAX_LOADING_S:
            self._loading_s = now_s
            self._notifier.loading(timeout_s=_LOADING_EXTENSION_S)

    def _say_alive(self) -> None:
        """Send a sign of life every quarter of the interval, if the engine's heartbeat is younger than half of it."""
        interval_s = self._notifier.watchdog_interval_s
        if interval_s is None or not (self._is_ready or self._is_stopping):
            return
        now_s = self._clock.monotonic_s()
        # Woken a little early, the quarter would otherwise become a half.
        is_due = now_s - self._alive_s >= interval_s / 4 * 0.9
        if is_due and self._models.heartbeat_age_s < interval_s / 2:
            self._alive_s = now_s
            self._notifier.alive()

    def _say_status(self) -> None:
        now_s = self._clock.monotonic_s()
        if now_s - self._status_s >= _STATUS_INTERVAL_S * 0.9 and self.status != self._status:
            self._notifier.status(self._noted_status())

    def _noted_status(self) -> str:
        self._status, self._status_s = self.status, self._clock.monotonic_s()
        return self._status
