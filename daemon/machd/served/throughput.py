"""Tokens per second of the whole daemon, over the last few seconds."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from machd.clock import Clock
from machd.engine.protocol.step import SampledToken
from machd.scheduler.events import Event, OutputGenerated

_WINDOW_S = 10.0


class Throughput:
    """Counts generated tokens. Lives on the event loop, like every observer of events."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._counts: deque[tuple[float, int]] = deque()

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second over the last ten seconds, or since the first token."""
        self._forget()
        if not self._counts:
            return 0.0
        since_s = self._clock.monotonic_s() - self._counts[0][0]
        return sum(count for _, count in self._counts) / max(1.0, since_s)

    def on_events(self, events: Sequence[Event]) -> None:
        """Count the tokens of a step."""
        count = sum(
            isinstance(event, OutputGenerated) and isinstance(event.output, SampledToken)
            for event in events
        )
        if count:
            self._counts.append((self._clock.monotonic_s(), count))
            self._forget()

    def _forget(self) -> None:
        oldest_s = self._clock.monotonic_s() - _WINDOW_S
        while self._counts and self._counts[0][0] < oldest_s:
            self._counts.popleft()
