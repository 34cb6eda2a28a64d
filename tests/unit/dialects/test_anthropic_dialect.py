"""Pieces of an answer in Anthropic's words: the message, and the exact order of events."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import RawMessageStreamEvent, StopReason
from pydantic import TypeAdapter
from support.daemon.serving_parts import identity_of

from machd.dialects.anthropic.stream import AnthropicDialect
from machd.errors import EngineFaultError
from machd.generations.choice import ChoiceDelta
from machd.generations.generation import GenerationUsage
from machd.reading.output import (
    Content,
    OutputPiece,
    Reasoning,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)

_EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
_USAGE = GenerationUsage(prompt_tokens=10, cached_tokens=4, completion_tokens=3)
_CALL: tuple[OutputPiece, ...] = (
    ToolCallStart(0, "call_1", "weather"),
    ToolCallArguments(0, '{"city": '),
    ToolCallArguments(0, '"Paris"}'),
    ToolCallEnd(0),
)


def _dialect(*, shows_thoughts: bool = True) -> AnthropicDialect:
    return AnthropicDialect(identity_of("msg_1"), "fake", shows_thoughts=shows_thoughts)


def _delta(
    *pieces: OutputPiece, finish_reason: str | None = None, stop: str | None = None
) -> ChoiceDelta:
    return ChoiceDelta(0, "", (), finish_reason, pieces, stop)


def _events(frames: bytes) -> list[tuple[str, dict[str, Any]]]:
    """Names and data of frames, read strictly."""
    *read, rest = frames.split(b"\n\n")
    assert rest == b""
    events = []
    for frame in read:
        name, data = frame.split(b"\n")
        assert name.startswith(b"event: ")
        assert data.startswith(b"data: ")
        events.append((name[7:].decode(), json.loads(data[6:])))
    return events


def _stream(
    *deltas: ChoiceDelta, usage: GenerationUsage = _USAGE, shows_thoughts: bool = True
) -> list[dict[str, Any]]:
    dialect = _dialect(shows_thoughts=shows_thoughts)
    opened = dialect.opening(replace(usage, completion_tokens=0))
    frames = [opened, *map(dialect.push, deltas), dialect.closing(usage)]
    events = _events(b"".join(frames))
    assert all(name == data["type"] for name, data in events)
    return [data for _, data in events]


def _whole(*deltas: ChoiceDelta, shows_thoughts: bool = True) -> dict[str, Any]:
    pieces = tuple(piece for delta in deltas for piece in delta.pieces)
    merged = _delta(*pieces, finish_reason=deltas[-1].finish_reason, stop=deltas[-1].stop)
    dialect = _dialect(shows_thoughts=shows_thoughts)
    dialect.push(merged)
    wire = json.loads(dialect.finish(_USAGE))
    assert isinstance(wire, dict)
    return wire


def _accumulated(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what Anthropic's own client makes of a stream."""
    snapshot: Any = None
    buffers: dict[int, bytes] = {}
    for event in events:
        if event["type"] != "ping":
            read = _EVENT.validate_python(event, strict=True)
            snapshot = accumulate_event(event=read, current_snapshot=snapshot, json_bufs=buffers)
    seen = snapshot.to_dict()
    assert isinstance(seen, dict)
    return seen


def test_the_exact_events_of_an_answer_with_everything() -> None:
    """Thoughts, text and a call come as blocks, one after the other, in Anthropic's order."""
    events = _stream(
        _delta(Reasoning("h")),
        _delta(Reasoning("m"), Content("Hel")),
        _delta(Content("lo"), *_CALL[:2]),
        _delta(*_CALL[2:], finish_reason="tool_calls"),
    )
    usage = {
        "input_tokens": 6,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 4,
        "output_tokens": 0,
    }
    message: dict[str, object] = {
        "type": "message",
        "id": "msg_1",
        "role": "assistant",
        "model": "fake",
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": usage,
    }
    thinking = {"type": "thinking", "thinking": "", "signature": ""}
    call = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {}}

    def start(index: int, block: Mapping[str, object]) -> dict[str, object]:
        return {"type": "content_block_start", "index": index, "content_block": block}

    def delta(index: int, kind: str, field: str, text: str) -> dict[str, object]:
        inner = {"type": kind, field: text}
        return {"type": "content_block_delta", "index": index, "delta": inner}

    def stop(index: int) -> dict[str, object]:
        return {"type": "content_block_stop", "index": index}

    assert events == [
        {"type": "message_start", "message": message},
        {"type": "ping"},
        start(0, thinking),
        delta(0, "thinking_delta", "thinking", "h"),
        delta(0, "thinking_delta", "thinking", "m"),
        delta(0, "signature_delta", "signature", ""),
        stop(0),
        start(1, {"type": "text", "text": ""}),
        delta(1, "text_delta", "text", "Hel"),
        delta(1, "text_delta", "text", "lo"),
        stop(1),
        start(2, call),
        delta(2, "input_json_delta", "partial_json", '{"city": '),
        delta(2, "input_json_delta", "partial_json", '"Paris"}'),
        stop(2),
        {
            "type": "message_delta",
            "delta": {"stop_reason": "tool_use", "stop_sequence": None},
            "usage": {**usage, "input_tokens": 6, "cache_read_input_tokens": 4, "output_tokens": 3},
        },
        {"type": "message_stop"},
    ]


def test_an_answer_of_nothing_has_no_blocks() -> None:
    """A model that ends at once says so, whole and streamed."""
    assert [event["type"] for event in _stream(_delta(finish_reason="stop"))] == [
        "message_start",
        "ping",
        "message_delta",
        "message_stop",
    ]
    assert _whole(_delta(finish_reason="stop"))["content"] == []


@pytest.mark.parametrize(
    ("finish_reason", "stop", "expected"),
    [
        ("stop", None, "end_turn"),
        ("stop", "STOP", "stop_sequence"),
        ("length", None, "max_tokens"),
        ("tool_calls", None, "tool_use"),
    ],
)
def test_stop_reasons(finish_reason: str, stop: str | None, expected: StopReason) -> None:
    """Each way to end has its word, and a stop sequence is named."""
    delta = _delta(Content("a"), finish_reason=finish_reason, stop=stop)
    for seen in (_whole(delta), _stream(delta)[-2]["delta"]):
        assert (seen["stop_reason"], seen["stop_sequence"]) == (expected, stop)


def test_calls_follow_each_other_in_blocks_of_their_own() -> None:
    """Two calls are two blocks, and so is text after a call."""
    deltas = [
        _delta(*_CALL, ToolCallStart(1, "call_2", "time"), ToolCallArguments(1, "{}")),
        _delta(ToolCallEnd(1), Content("so"), finish_reason="tool_calls"),
    ]
    content = _whole(*deltas)["content"]
    assert [block["type"] for block in content] == ["tool_use", "tool_use", "text"]
    assert content[0]["input"] == {"city": "Paris"}
    assert content[1] == {"type": "tool_use", "id": "toolu_2", "name": "time", "input": {}}
    assert _accumulated(_stream(*deltas))["content"] == content


@pytest.mark.parametrize(
    ("text", "input_"),
    [
        ("", {}),
        ('{"a": ', {}),
        ('{"a": 1', {}),
        ("[1]", {}),
        ("{" * 5000, {}),
        ('{"a":1}', {"a": 1}),
    ],
)
def test_a_call_that_was_cut_short_still_has_an_object(text: str, input_: object) -> None:
    """``input`` is an object whatever ``max_tokens`` left of it, and the block is ended."""
    pieces: list[OutputPiece] = [_CALL[0], *([ToolCallArguments(0, text)] if text else [])]
    delta = _delta(*pieces, finish_reason="length")
    whole = _whole(delta)
    assert whole["content"][0]["input"] == input_
    assert whole["stop_reason"] == "max_tokens"
    assert _stream(delta)[-3] == {"type": "content_block_stop", "index": 0}


def test_thoughts_that_are_not_to_be_shown_leave_an_empty_block() -> None:
    """Thoughts are not told where the client wants none, and their place stays."""
    delta = _delta(Reasoning("secret"), Content("hi"), finish_reason="stop")
    whole = _whole(delta, shows_thoughts=False)
    events = _stream(delta, shows_thoughts=False)
    assert "secret" not in json.dumps([whole, events])
    assert whole["content"][0] == {"type": "thinking", "thinking": "", "signature": ""}
    assert _accumulated(events)["content"] == whole["content"]


def test_keep_alives_and_failures_are_events() -> None:
    """Silence is a ping; a failure is an error event in Anthropic's envelope, and nothing after."""
    dialect = _dialect()
    assert dialect.keep_alive == b'event: ping\ndata: {"type":"ping"}\n\n'
    assert _events(dialect.failure(EngineFaultError("broken"))) == [
        (
            "error",
            {
                "type": "error",
                "error": {"type": "api_error", "message": "broken"},
                "request_id": "req",
            },
        )
    ]
