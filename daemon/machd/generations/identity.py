"""The identity of a request's generation."""

from __future__ import annotations

from dataclasses import dataclass

from machd.generations.trace_context import TraceContext
from machd.request.adapter import Adapter


@dataclass(frozen=True, slots=True)
class GenerationIdentity:
    """The client, the endpoint and the ids of a request; never its text.

    Attributes:
        generation_id: The answer's id, which is unique.
        request_id: The request's id; one that a client sets need not be unique.
        endpoint: Name of the endpoint family, such as ``chat_completions``.
        client: Name of the API key, or ``anonymous``.
        arrived_s: On the monotonic clock.
        created_unix_s: Whole seconds, as the answer carries it.
        model: The served model's id.
        trace: The trace that the request is part of, if any.
        is_limited: Whether it counts for the client's limits; an operator's own requests do not.
        adapters: Adapters that compute the answer; empty for the model itself.
    """

    generation_id: str
    request_id: str
    endpoint: str
    client: str
    arrived_s: float
    created_unix_s: int
    model: str = ""
    trace: TraceContext | None = None
    is_limited: bool = True
    adapters: tuple[Adapter, ...] = ()

    @property
    def adapter_name(self) -> str | None:
        """Names of the adapters, joined by a plus sign; None without one."""
        return "+".join(one.name for one in self.adapters) or None
