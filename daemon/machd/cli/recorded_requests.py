"""Recorded requests, read from JSON Lines: conversations, as the daemon reads them.

Each line is an object: ``path`` and ``body`` of a request, and perhaps ``client``, the name of its API key. Other fields, such as
a time, are left aside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
from msgspec import Raw, Struct

from machd.dialects.anthropic.request import MessagesRequest
from machd.dialects.chat.request import ChatCompletionRequest
from machd.dialects.ollama.request import OllamaChatRequest
from machd.dialects.responses.request import ResponsesRequest
from machd.dialects.wire.decoding import decode_body
from machd.errors import InvalidRequestError, RequestError
from machd.request.conversation import Conversation


class RecordedLine(Struct, frozen=True, kw_only=True):
    """A line of the file."""

    path: str
    body: Raw
    client: str = "anonymous"


@dataclass(frozen=True, slots=True)
class RecordedConversation:
    """A conversation that a client sent.

    Attributes:
        line: Number of its line, from 1.
        client: Name of its API key.
        salt: Its ``cache_salt``; None without one.
    """

    line: int
    client: str
    salt: str | None
    conversation: Conversation


@dataclass(frozen=True, slots=True)
class SkippedLine:
    """A line without a conversation, and why."""

    line: int
    reason: str


def recorded_requests(path: Path) -> Iterator[RecordedConversation | SkippedLine]:
    """Read a file line by line.

    Raises:
        OSError: It cannot be read.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield read_line(number, line)


def read_line(number: int, line: bytes) -> RecordedConversation | SkippedLine:
    """Read a line."""
    try:
        recorded = msgspec.json.decode(line, type=RecordedLine)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return SkippedLine(number, "it is no JSON object with path and body")
    reader = _READERS.get(urlsplit(recorded.path).path)
    if reader is None:
        return SkippedLine(number, "requests to its path hold no conversation")
    try:
        conversation, salt = reader(bytes(recorded.body))
    except RequestError as error:
        return SkippedLine(number, f"machd would refuse it: {error}")
    if not conversation.messages:
        return SkippedLine(number, "it has no messages")
    located = replace(conversation, is_located=True, message_indices=None)
    return RecordedConversation(number, recorded.client, salt, located)


_Read = tuple[Conversation, str | None]


def _chat(body: bytes) -> _Read:
    request = decode_body(body, ChatCompletionRequest).checked()
    return request.conversation(), request.cache_salt


def _messages(body: bytes) -> _Read:
    request = decode_body(body, MessagesRequest).checked()
    return request.conversation(), request.options().cache_salt


def _responses(body: bytes) -> _Read:
    request = decode_body(body, ResponsesRequest).checked()
    if request.previous_response_id is not None or request.referenced_ids:
        raise InvalidRequestError("it stands on an earlier response, which it does not hold")
    chain = request.chain(previous=(), referenced={})
    return request.continued(chain), request.options().cache_salt


def _ollama_chat(body: bytes) -> _Read:
    request = decode_body(body, OllamaChatRequest).checked()
    return request.conversation(), None


_READERS: Mapping[str, Callable[[bytes], _Read]] = {
    "/v1/chat/completions": _chat,
    "/v1/messages": _messages,
    "/v1/responses": _responses,
    "/api/chat": _ollama_chat,
}
"""Readers of bodies by path."""
