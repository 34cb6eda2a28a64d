"""Events of a completion as LM Studio's fragments, calls and statistics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import msgspec
import pytest
from msgspec import Raw

from machd.dialects.lm_studio_socket.prediction import GrowingAnswer
from machd.dialects.lm_studio_socket.session import Channel
from machd.http.inner_request import InnerClient


class _Told:
    """A channel whose packets are kept."""

    def __init__(self) -> None:
        self.packets: list[Mapping[str, Any]] = []
        client = InnerClient(cast(Any, None), cast(Any, None), None)
        self.channel = Channel(client, self._send)

    async def _send(self, message: Mapping[str, object]) -> None:
        assert message["type"] == "channelSend"
        self.packets.append(cast(Mapping[str, Any], message["message"]))

    @property
    def fragments(self) -> list[tuple[str, str]]:
        """Kind and text of each fragment."""
        told = [one["fragment"] for one in self.packets if one["type"] == "fragment"]
        return [(one["reasoningType"], one["content"]) for one in told]


def _event(finish: str | None = None, **delta: object) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return b"data: " + msgspec.json.encode({"choices": [choice]})


async def test_thoughts_stand_between_their_tags() -> None:
    """Thoughts have a kind of their own, and tags that count as no token."""
    told = _Told()
    answer = GrowingAnswer(told.channel)
    for piece in ({"reasoning_content": "a"}, {"reasoning_content": "b"}, {"content": "c"}):
        await answer.take(_event(**piece))
    await answer.end_thought()
    assert told.fragments == [
        ("reasoningStartTag", "<think>"),
        ("reasoning", "a"),
        ("reasoning", "b"),
        ("reasoningEndTag", "</think>"),
        ("none", "c"),
    ]
    assert answer.stats(None)["predictedTokensCount"] == 3


async def test_thoughts_that_are_cut_end_all_the_same() -> None:
    """An answer of thoughts alone has its last tag."""
    told = _Told()
    answer = GrowingAnswer(told.channel)
    await answer.take(_event(finish="length", reasoning_content="a"))
    await answer.end_thought()
    await answer.end_thought()
    assert told.fragments[-1] == ("reasoningEndTag", "</think>")
    assert len(told.fragments) == 3


async def test_calls_are_told_whole() -> None:
    """Pieces of a call's arguments become one object; a call that was cut is told as failed."""
    told = _Told()
    answer = GrowingAnswer(told.channel)
    await answer.take(_event(tool_calls=[{"index": 0, "id": "one", "function": {"name": "f"}}]))
    for text in ('{"a":', "1}"):
        await answer.take(_event(tool_calls=[{"index": 0, "function": {"arguments": text}}]))
    cut = {"index": 1, "id": "two", "function": {"name": "g", "arguments": '{"a'}}
    await answer.take(_event(finish="tool_calls", tool_calls=[cut]))
    await answer.tell_calls()
    assert [one["type"] for one in told.packets] == [
        "toolCallGenerationStart",
        "toolCallGenerationEnd",
        "toolCallGenerationStart",
        "toolCallGenerationFailed",
    ]
    assert told.packets[1]["toolCallRequest"] == {
        "type": "function",
        "id": "one",
        "name": "f",
        "arguments": {"a": 1},
    }
    assert answer.stats(None)["stopReason"] == "toolCalls"


@pytest.mark.parametrize(
    ("finish", "max_tokens", "reason"),
    [
        ("stop", None, "eosFound"),
        ("length", Raw(b"7"), "maxPredictedTokensReached"),
        ("length", Raw(b"8"), "contextLengthReached"),
        ("length", None, "contextLengthReached"),
    ],
)
async def test_stats_name_the_reason_of_the_end(
    finish: str, max_tokens: Raw | None, reason: str
) -> None:
    """The bound of the client is told from that of the context; figures are those of the usage."""
    answer = GrowingAnswer(_Told().channel)
    await answer.take(_event(finish=finish, content="a"))
    usage = {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 7}}
    await answer.take(b"data: " + msgspec.json.encode(usage))
    await answer.take(b"data: [DONE]")
    stats = answer.stats(max_tokens)
    assert stats["stopReason"] == reason
    assert (stats["promptTokensCount"], stats["totalTokensCount"]) == (5, 12)


async def test_comments_tell_that_the_prompt_is_computed() -> None:
    """Until the first fragment a comment is progress, so that a client does not give up; then it is nothing."""
    told = _Told()
    answer = GrowingAnswer(told.channel)
    await answer.take(b": loading alpha")
    await answer.take(_event(content="a"))
    await answer.take(b": keep-alive")
    assert [one["type"] for one in told.packets] == ["promptProcessingProgress", "fragment"]


async def test_error_in_the_stream_is_kept() -> None:
    """An event that is an error is what ended the answer."""
    answer = GrowingAnswer(_Told().channel)
    event = b'{"error":{"message":"too late","code":"drain_deadline"}}'
    await answer.take(b"data: " + event)
    assert answer.error == event
