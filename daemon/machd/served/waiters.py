"""What waits until a model is ready."""

from __future__ import annotations

import asyncio

from machd.clock import Clock
from machd.errors import MachdError


class Waiters:
    """Requests by their futures, and answers of a suspended model, which have none. Lives on the event loop.

    Attributes:
        since_s: When the oldest began to wait; None where none does, or where they all have left.
    """

    def __init__(self, clock: Clock) -> None:
        """Begin without any."""
        self.since_s: float | None = None
        self._clock = clock
        self._event_loop = asyncio.get_running_loop()
        self._futures: list[asyncio.Future[None]] = []

    @property
    def has_requests(self) -> bool:
        """Whether a request waits that has not been given up."""
        self._futures = [one for one in self._futures if not one.done()]
        return bool(self._futures)

    def begin(self) -> None:
        """Count the time from now, unless something waits already."""
        if self.since_s is None:
            self.since_s = self._clock.monotonic_s()

    def add(self) -> asyncio.Future[None]:
        """Have a request wait; the future resolves with :meth:`resolve`."""
        self.begin()
        future: asyncio.Future[None] = self._event_loop.create_future()
        self._futures.append(future)
        return future

    def resolve(self, error: MachdError | None) -> None:
        """End the wait of all requests: the model is ready, or ``error`` says why it is not."""
        futures, self._futures = self._futures, []
        for one in futures:
            if one.done():
                continue
            if error is None:
                one.set_result(None)
            else:
                one.set_exception(error)
