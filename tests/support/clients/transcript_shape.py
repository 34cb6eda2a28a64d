"""Recorded exchanges as a readable value in which nothing changes from run to run."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from support.clients.client_transcript import Exchange

_WIDTH = 100
_FLEETING = {
    "created": "<time>",
    "created_at": "<time>",
    "completed_at": "<time>",
    "sequence_number": "<number>",
    "system_fingerprint": "<fingerprint>",
    **dict.fromkeys(("total_duration", "prompt_eval_duration", "eval_duration"), "<time>"),
}
_TEXTS = frozenset(
    {"arguments", "content", "delta", "partial_json", "reasoning", "reasoning_content"}
    | {"response", "text", "thinking"}
)
_ID = re.compile(r"\b(chatcmpl|cmpl|resp|msg|call|toolu|fc|rs|req)([-_])[0-9a-f]{16,}(_[0-9]+)?\b")


def exchange_shape(exchanges: Sequence[Exchange], *, is_scripted: bool) -> list[object]:
    """Requests and answers with placeholders for ids and times, and the texts of streams in one.

    Args:
        exchanges: In the order of the requests.
        is_scripted: Whether texts, token counts and probabilities stay as they are.
    """
    placeholders = _Placeholders(is_scripted=is_scripted)
    return [_one(exchange, placeholders) for exchange in exchanges]


def _one(exchange: Exchange, placeholders: _Placeholders) -> dict[str, object]:
    request: dict[str, object] = {"method": exchange.method, "path": exchange.path}
    if exchange.request:
        request["body"] = json.loads(exchange.request)
    answer: dict[str, object] = {"status": exchange.status, "content_type": exchange.content_type}
    if exchange.content_type.startswith("text/event-stream"):
        answer["events"] = _joined(_parted(_events(bytes(exchange.answer))))
    elif exchange.content_type == "application/x-ndjson":
        answer["lines"] = _joined([json.loads(line) for line in exchange.answer.splitlines()])
    else:
        answer["body"] = json.loads(bytes(exchange.answer))
    return {
        "request": placeholders.in_request(request),
        "answer": placeholders.in_answer(answer),
    }


def _events(stream: bytes) -> list[object]:
    """The events of a stream; a named one repeats its name in its data."""
    *frames, rest = stream.decode().split("\n\n")
    assert rest == "", f"the stream does not end with an empty line: {rest!r}"
    return [_event(frame.split("\n")) for frame in frames if not frame.startswith(":")]


def _event(lines: list[str]) -> object:
    name = lines[0].removeprefix("event: ") if len(lines) == 2 else None
    data = lines[-1].removeprefix("data: ")
    assert len(lines) == 1 + (name is not None)
    assert lines[-1] == f"data: {data}"
    if data == "[DONE]":
        return data
    event = json.loads(data)
    assert name is None or event["type"] == name
    return event


def _parted(events: Iterable[object]) -> Iterator[object]:
    """Events of chats as they are where the model is slow: one thing said in each."""
    for event in events:
        if isinstance(event, dict) and len(event.get("choices", ())) == 1:
            (choice,) = event["choices"]
            yield from ({**event, "choices": [one]} for one in _parted_choice(choice))
        else:
            yield event


def _parted_choice(choice: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A call's name, its arguments, and the end of the choice, each for itself."""
    delta, reason = choice["delta"], choice["finish_reason"]
    unfinished = {**choice, "finish_reason": None}
    for call in delta.get("tool_calls", ()):
        said = call["function"]["arguments"]
        if "id" in call:
            start = {**call, "function": {**call["function"], "arguments": ""}}
            yield {**unfinished, "delta": {"tool_calls": [start]}}
        if said:
            more = {"index": call["index"], "function": {"arguments": said}}
            yield {**unfinished, "delta": {"tool_calls": [more]}}
    if delta and "tool_calls" not in delta:
        yield {**unfinished, "delta": delta}
    if reason is not None:
        yield {**choice, "delta": {}, "logprobs": None if delta else choice["logprobs"]}


def _joined(events: Iterable[object]) -> list[object]:
    """Events that differ in their text alone become one: where a text is cut is no promise."""
    joined: list[object] = []
    for event in events:
        try:
            if joined and _has_text(event):
                joined[-1] = _sum(joined[-1], event)
            else:
                joined.append(event)
        except _UnlikeError:
            joined.append(event)
    return joined


def _has_text(value: object, name: str = "") -> bool:
    if isinstance(value, dict):
        return any(_has_text(one, key) for key, one in value.items())
    if isinstance(value, list):
        return any(_has_text(one) for one in value)
    return isinstance(value, str) and name in _TEXTS


def _sum(first: Any, second: Any, name: str = "") -> Any:
    """One event of two whose texts are put together."""
    if name == "sequence_number":
        return first
    if isinstance(first, dict) and isinstance(second, dict) and first.keys() == second.keys():
        add = _sum_of_logprobs if name == "logprobs" else _sum
        return {key: add(first[key], second[key], key) for key in first}
    if isinstance(first, list) and isinstance(second, list):
        if name == "logprobs":
            return first + second
        if len(first) == len(second):
            return [_sum(*pair) for pair in zip(first, second, strict=True)]
    if isinstance(first, str) and isinstance(second, str) and name in _TEXTS:
        return first + second
    if first != second:
        raise _UnlikeError
    return first


def _sum_of_logprobs(first: Any, second: Any, name: str) -> Any:
    del name
    return first + second if isinstance(first, list) and isinstance(second, list) else first


class _UnlikeError(Exception):
    """Two events differ in more than their text."""


class _Placeholders:
    """Stand-ins for what changes; the same id has the same one in the whole transcript."""

    def __init__(self, *, is_scripted: bool) -> None:
        self._is_scripted = is_scripted
        self._ids: dict[str, str] = {}
        self._counts: dict[str, int] = {}

    def in_request(self, value: Any) -> Any:
        """Ids alone: the rest is the client's."""
        if isinstance(value, dict):
            return {key: self.in_request(one) for key, one in value.items()}
        if isinstance(value, list):
            return [self.in_request(one) for one in value]
        return _ID.sub(self._id, value) if isinstance(value, str) else value

    def in_answer(self, value: Any, name: str = "") -> Any:
        """Ids, times and numbers of events; what a real model said, and its probabilities."""
        if value is not None and name in _FLEETING:
            return _FLEETING[name]
        if self._is_scripted or not value:
            return self._within(value)
        if name in ("usage", "prompt_eval_count", "eval_count"):
            return _hidden_counts(value)
        if name in ("input", "logprobs"):
            return f"<{name}>"
        return "<text>" if name in _TEXTS and isinstance(value, str) else self._within(value)

    def _within(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: self.in_answer(one, key) for key, one in value.items()}
        if isinstance(value, list):
            return [self.in_answer(one) for one in value]
        return _ID.sub(self._id, value) if isinstance(value, str) else value

    def _id(self, match: re.Match[str]) -> str:
        if match[0] not in self._ids:
            number = self._counts[match[1]] = self._counts.get(match[1], 0) + 1
            self._ids[match[0]] = f"<{match[1]}{match[2]}{number}>"
        return self._ids[match[0]]


def _hidden_counts(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _hidden_counts(one) for key, one in value.items()}
    return "<count>"


def laid_out(value: Any, indent: int = 0) -> str:
    """JSON in which whatever fits a line stands on one."""
    line = json.dumps(value, ensure_ascii=False)
    if len(line) + indent <= _WIDTH or not isinstance(value, dict | list) or not value:
        return line
    inner = " " * (indent + 2)
    if isinstance(value, dict):
        lines = [f"{json.dumps(key)}: {laid_out(one, indent + 2)}" for key, one in value.items()]
    else:
        lines = [laid_out(one, indent + 2) for one in value]
    opening, closing = ("{", "}") if isinstance(value, dict) else ("[", "]")
    body = f",\n{inner}".join(lines)
    return f"{opening}\n{inner}{body}\n{' ' * indent}{closing}"
