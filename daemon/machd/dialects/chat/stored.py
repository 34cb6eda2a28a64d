"""``GET`` and ``DELETE /v1/chat/completions/{id}``: chat completions that were made with ``store``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from litestar import Request, Response, delete, get
from litestar.di import NamedDependency
from litestar.params import FromPath

from machd.dialects.chat.answer import DeletedChatCompletion
from machd.errors import MachdError, NotFoundError
from machd.http.authentication import client_name
from machd.http.context import ServerContext
from machd.http.pacing import merge_deltas
from machd.http.stream import Dialect
from machd.serving.generation import ChoiceDelta, GenerationIdentity, GenerationUsage
from machd.serving.response_store import ResponseStore, StoredResponse, Turn

_KEY_PREFIX = "chat.completion/"
"""Keeps the ids apart from those of ``/v1/responses``, which hold no slash."""

_NOT_STORED = (
    "no such chat completion is stored here; it may have been made without store: true, with another "
    "API key or before a restart, or dropped for want of room (limits.max_stored_responses, "
    "limits.max_stored_response_bytes)"
)


@get(["/v1/chat/completions/{completion_id:str}", "/chat/completions/{completion_id:str}"])
async def get_chat_completion(
    request: Request[Any, Any, Any],
    context: NamedDependency[ServerContext],
    completion_id: FromPath[str],
) -> Response[bytes]:
    """Return a stored chat completion, as it was answered."""
    context.service.lifecycle.check_accepting()
    found = context.responses.get(client_name(request.scope), _KEY_PREFIX + completion_id)
    if found is None:
        raise NotFoundError(_NOT_STORED, param="completion_id")
    return Response(found.answer, media_type="application/json")


@delete(
    ["/v1/chat/completions/{completion_id:str}", "/chat/completions/{completion_id:str}"],
    status_code=200,
)
async def delete_chat_completion(
    request: Request[Any, Any, Any],
    context: NamedDependency[ServerContext],
    completion_id: FromPath[str],
) -> DeletedChatCompletion:
    """Forget a stored chat completion."""
    context.service.lifecycle.check_accepting()
    if not context.responses.delete(client_name(request.scope), _KEY_PREFIX + completion_id):
        raise NotFoundError(_NOT_STORED, param="completion_id")
    return DeletedChatCompletion(id=completion_id)


def keep_in(store: ResponseStore, identity: GenerationIdentity) -> Callable[[bytes], None]:
    """A function that stores the whole answer of a generation."""

    def keep(answer: bytes) -> None:
        key = _KEY_PREFIX + identity.generation_id
        store.put(identity.client, key, StoredResponse(answer, Turn(()), ()))

    return keep


class KeepingDialect:
    """A dialect whose whole answer is also kept, streamed or not; one that fails is not."""

    def __init__(self, dialect: Dialect, keep: Callable[[bytes], None]) -> None:
        """Write as ``dialect`` does, and hand the whole answer to ``keep``."""
        self._dialect = dialect
        self._keep = keep
        self._gained: dict[int, list[ChoiceDelta]] = {}
        self.keep_alive = dialect.keep_alive
        self.media_type = dialect.media_type

    def opening(self, usage: GenerationUsage) -> bytes:
        """Events before any text."""
        return self._dialect.opening(usage)

    def event(self, delta: ChoiceDelta) -> bytes:
        """One choice's news."""
        self._gained.setdefault(delta.index, []).append(delta)
        return self._dialect.event(delta)

    def closing(self, usage: GenerationUsage) -> bytes:
        """Events that end the stream, whose whole answer is kept now."""
        merged = [merge_deltas(deltas) for _, deltas in sorted(self._gained.items())]
        self._keep(self._dialect.whole(merged, usage))
        return self._dialect.closing(usage)

    def failure(self, error: MachdError) -> bytes:
        """Events that end a stream that cannot go on."""
        return self._dialect.failure(error)

    def whole(self, deltas: Sequence[ChoiceDelta], usage: GenerationUsage) -> bytes:
        """The answer in one piece."""
        answer = self._dialect.whole(deltas, usage)
        self._keep(answer)
        return answer
