"""What happens in the daemon, as it happens, for operators who watch. Nothing that a user typed."""

from __future__ import annotations

from collections.abc import Sequence

from machd.scheduler.events import Event

__all__ = ["EventFeed"]


class EventFeed:
    """Observes every event. Lives on the event loop."""

    def on_events(self, events: Sequence[Event]) -> None:
        """Hand a step's events to whoever watches."""
