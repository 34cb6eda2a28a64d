"""The same kinds of answers in four dialects, read so that two of them can be compared.

Ids, times and what a prefix cache had are left out; what a stream says in pieces is joined.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx

from support.clients.answers import tool
from support.clocks.polling import CEILING_S

_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
_TOKENS = 90


def _user(text: str) -> list[dict[str, object]]:
    return [{"role": "user", "content": text}]


@dataclass(frozen=True)
class Question:
    """A request, and how its stream is read."""

    path: str
    fields: dict[str, object]

    def ask(self, url: str) -> object:
        """Return the whole answer, without what differs each time."""
        body = {**self.fields, "stream": False}
        answer = httpx.post(url + self.path, json=body, timeout=CEILING_S)
        assert answer.status_code == 200, answer.text
        return _stable(answer.json())

    def ask_streamed(self, url: str) -> object:
        """Return the texts of a stream, joined, and its ends."""
        body: dict[str, object] = {**self.fields, "stream": True}
        if self.path.startswith("/v1/c"):
            body["stream_options"] = {"include_usage": True}
        texts: dict[str, str] = {}
        ends: list[tuple[str, object]] = []
        with httpx.stream("POST", url + self.path, json=body, timeout=CEILING_S) as answer:
            assert answer.status_code == 200, answer.read()
            for line in answer.iter_lines():
                content = line.removeprefix("data: ")
                if content.startswith("{"):
                    _read(json.loads(content), texts, ends)
        # Choices may end in another order; what stands in one place comes in order.
        return texts, sorted(ends, key=lambda one: one[0])


def questions(model: str) -> list[Question]:
    """One of each kind: greedy, seeded, with a grammar, tools, choices, log-probabilities and stop texts."""
    sampled = {"temperature": 0.8, "seed": 11}
    chat, short = "/v1/chat/completions", {"max_tokens": _TOKENS}
    wanted = {"type": "json_schema", "json_schema": {"name": "a", "schema": _SCHEMA}}
    calling = {"tools": [tool("get_weather", city="string")], "tool_choice": "required"}
    made: list[tuple[str, dict[str, object]]] = [
        (chat, {"messages": _user("Tell me of the sea."), "temperature": 0, **short}),
        (chat, {"messages": _user("Tell me of the moon."), **sampled, **short}),
        (chat, {"messages": _user("Who is it?"), "response_format": wanted, **sampled, **short}),
        (chat, {"messages": _user("The weather in Rome?"), **calling, **sampled, **short}),
        (chat, {"messages": _user("A poem."), "logprobs": True, "top_logprobs": 2, **sampled, **short}),
        ("/v1/completions", {"prompt": "Once upon a time", "n": 3, **sampled, **short}),
        ("/v1/completions", {"prompt": "One two three", "stop": [" seven", ".\n"], **sampled, **short}),
        ("/v1/completions", {"prompt": "All is", "frequency_penalty": 0.9, "logit_bias": {"30": 2}, **sampled, **short}),
        ("/v1/completions", {"prompt": "It was", "min_tokens": 60, **sampled, **short}),
        ("/v1/messages", {"messages": _user("Tell me of the wind."), "temperature": 0, **short}),
        ("/v1/responses", {"input": "Tell me of trees.", "temperature": 0, "max_output_tokens": _TOKENS}),
        ("/api/chat", {"messages": _user("Tell me of rain."), "options": {"temperature": 0, "num_predict": _TOKENS}}),
    ]  # fmt: skip
    return [Question(path, {"model": model, **fields}) for path, fields in made]


_VOLATILE = {"id", "item_id", "call_id", "created", "created_at", "completed_at", "timings"}
_VOLATILE |= {"cached_tokens", "cache_read_input_tokens", "prompt_tokens_details", "input_tokens"}
_VOLATILE |= {"input_tokens_details", "accepted_prediction_tokens", "rejected_prediction_tokens"}


def _stable(value: object) -> object:
    match value:
        case dict():
            return {
                key: _stable(one)
                for key, one in value.items()
                if key not in _VOLATILE and not key.endswith("_duration")
            }
        case list():
            return [_stable(one) for one in value]
        case _:
            return value


_TEXTS = ("content", "text", "thinking", "reasoning_content", "partial_json", "arguments", "delta")
_ENDS = ("finish_reason", "stop_reason", "done_reason", "usage", "eval_count", "token", "logprob")


def _read(frame: dict[str, Any], texts: dict[str, str], ends: list[tuple[str, object]]) -> None:
    """Join the texts of a frame to those before, by where they stand, and note what says how it ends."""
    if str(frame.get("type", "")).startswith("response.") and frame["type"] != "response.completed":
        frame = {"delta": frame.get("delta")}
    elif frame.get("type") == "response.completed":
        ends.append(("", _stable(frame["response"])))
        return
    for place, key, value in _leaves(frame, ""):
        if key in _TEXTS and isinstance(value, str):
            texts[place] = texts.get(place, "") + value
        elif key in _ENDS and value is not None:
            ends.append((place, _stable(value)))


def _leaves(value: object, place: str) -> Iterator[tuple[str, str, object]]:
    """Go through the values of a frame, with their places; items of a list without an index have one place."""
    items: list[tuple[object, object]] = []
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list):
        items = [(one.get("index", "") if isinstance(one, dict) else "", one) for one in value]
    for key, one in items:
        where = f"{place}/{key}"
        if key == "usage" or not isinstance(one, dict | list):
            yield where, str(key), one
        else:
            yield from _leaves(one, where)
