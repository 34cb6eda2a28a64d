"""A request that waits until its model is ready, as operators see it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from machd.errors import MachdError

if TYPE_CHECKING:
    from machd.served.named_model import NamedModel


@dataclass(frozen=True, slots=True)
class Asker:
    """The request; never its text.

    Attributes:
        request_id: The request's id; one that a client sets need not be unique.
        endpoint: Name of the endpoint family, such as ``chat_completions``.
        client: Name of the API key, or ``anonymous``.
        arrived_s: On the monotonic clock.
        adapter: Names of the adapters that it asks for; None without one.
    """

    request_id: str
    endpoint: str
    client: str
    arrived_s: float
    adapter: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class WaitingRequest:
    """The request and its model.

    Attributes:
        waiting_id: Unique among those that wait: the answer has no id yet.
    """

    waiting_id: str
    asker: Asker
    model: NamedModel
    ready: asyncio.Future[None]

    def fail(self, error: MachdError) -> None:
        """End its wait; its client gets ``error``."""
        if not self.ready.done():
            self.ready.set_exception(error)
