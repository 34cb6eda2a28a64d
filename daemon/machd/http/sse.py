"""Frames of server-sent events, and the media types of streams.

Line feeds alone: common clients split on two of them and know nothing else.
"""

from __future__ import annotations

EVENT_STREAM = b"text/event-stream; charset=utf-8"

JSON_LINES = b"application/x-ndjson"
"""A JSON object on each line, as Ollama streams."""

COMMENT_KEEP_ALIVE = b": keep-alive\n\n"
"""A comment, which clients skip."""

DONE = b"data: [DONE]\n\n"
"""The end of a stream of OpenAI's chat completions and completions."""


def comment(text: str) -> bytes:
    """A comment of one line, which clients skip."""
    return b": " + " ".join(text.split()).encode() + b"\n\n"


def data_frame(data: bytes) -> bytes:
    """An event without a name; ``data`` is one line."""
    return b"data: " + data + b"\n\n"


def event_frame(name: str, data: bytes) -> bytes:
    """An event with a name; ``data`` is one line."""
    return b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"
