"""Know when a request has come as far as the engine thread's inbox."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from machd.engine_process.inbox import Inbox, Message, Submit
from support.clocks.polling import wait_until


class Arrivals:
    """Counts the requests that arrive while it is patched in."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        """Begin to count."""
        self._count = 0
        put = Inbox.put

        def counted(inbox: Inbox, message: Message) -> None:
            put(inbox, message)
            self._count += isinstance(message, Submit)

        patch.setattr(Inbox, "put", counted)

    def wait_for_one_more(self, send: Callable[[], None]) -> None:
        """Return when what ``send`` sends has arrived."""
        count = self._count
        send()
        wait_until(lambda: self._count > count, "a request has arrived")
