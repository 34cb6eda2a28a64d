"""Changes that somebody waits for, known outside the engine thread, too.

That thread may be measuring, or hang, when the daemon leaves. Whoever waits is told all the same,
by whoever ends it; what the thread says of it later is then no news.
"""

from __future__ import annotations

import threading

from machd.errors import MachdError
from machd.serving.inbox import ChangeConfig


class OpenChanges:
    """What was asked for and is not answered yet; for any thread."""

    def __init__(self) -> None:
        """Begin with none."""
        self._lock = threading.Lock()
        self._changes: list[ChangeConfig] = []
        self._end_error: MachdError | None = None

    @property
    def is_empty(self) -> bool:
        """Whether nobody waits."""
        with self._lock:
            return all(one.done.done() for one in self._changes)

    def add(self, change: ChangeConfig) -> None:
        """Keep one until it is answered, which is at once after :meth:`refuse`."""
        with self._lock:
            self._changes = [one for one in self._changes if not one.done.done()]
            self._changes.append(change)
            error = self._end_error
        if error is not None:
            change.answer(error)

    def refuse(self, error: MachdError) -> None:
        """Tell all who wait, and all who come, that it will never be done; the first time counts."""
        with self._lock:
            if self._end_error is None:
                self._end_error = error
            error, changes = self._end_error, self._changes
            self._changes = []
        for one in changes:  # not under the lock: whoever is told may ask for another
            one.answer(error)
