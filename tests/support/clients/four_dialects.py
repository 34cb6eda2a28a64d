"""The same kinds of answers in four dialects, read so that two of them can be compared.

Ids, times and what a prefix cache had are left out; what a stream says in pieces is joined.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, Future
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
_CHAT = "/v1/chat/completions"


def _user(text: object) -> list[dict[str, object]]:
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


def questions(model: str, *, longest_tokens: int = 90) -> list[Question]:
    """One of each kind: greedy, seeded, with a grammar, tools, choices, log-probabilities and stop texts.

    No two are of one length, so that some end while others go on.
    """
    sampled: dict[str, object] = {"temperature": 0.8, "seed": 11}
    greedy: dict[str, object] = {"temperature": 0}
    wanted = {"type": "json_schema", "json_schema": {"name": "a", "schema": _SCHEMA}}
    calling = {"tools": [tool("get_weather", city="string")], "tool_choice": "required"}
    lengths = iter(range(longest_tokens, 0, -longest_tokens // 15))

    def short() -> dict[str, object]:
        return {"max_tokens": next(lengths)}

    made: list[tuple[str, dict[str, object]]] = [
        (_CHAT, {"messages": _user("Tell me of the sea."), **greedy, **short()}),
        (_CHAT, {"messages": _user("Tell me of the moon."), **sampled, **short()}),
        (_CHAT, {"messages": _user("Who is it?"), "response_format": wanted, **sampled, **short()}),
        (_CHAT, {"messages": _user("The weather in Rome?"), **calling, **sampled, **short()}),
        (_CHAT, {"messages": _user("A poem."), "logprobs": True, "top_logprobs": 2, **sampled, **short()}),
        ("/v1/completions", {"prompt": "Once upon a time", "n": 3, **sampled, **short()}),
        ("/v1/completions", {"prompt": "One two three", "stop": [" seven", ".\n"], **sampled, **short()}),
        ("/v1/completions", {"prompt": "All is", "frequency_penalty": 0.9, "logit_bias": {"30": 2}, **sampled, **short()}),
        ("/v1/completions", {"prompt": "It was", "min_tokens": longest_tokens // 3, **sampled, **short()}),
        ("/v1/messages", {"messages": _user("Tell me of the wind."), **greedy, **short()}),
        ("/v1/responses", {"input": "Tell me of trees.", **greedy, "max_output_tokens": next(lengths)}),
        ("/api/chat", {"messages": _user("Tell me of rain."), "options": {**greedy, "num_predict": next(lengths)}}),
    ]  # fmt: skip
    return [Question(path, {"model": model, **fields}) for path, fields in made]


def image_questions(
    model: str, pictures: Sequence[bytes], *, longest_tokens: int = 160
) -> list[Question]:
    """Of six pictures in PNG, in four dialects: one, two, two choices, and a text beside them.

    Answers are of ``longest_tokens`` and of fewer, none of the length of another.
    """
    sampled: dict[str, object] = {"temperature": 0.8, "seed": 5, "ignore_eos": True}
    files = [base64.b64encode(one).decode() for one in pictures]
    urls = [f"data:image/png;base64,{one}" for one in files]
    shown = [{"type": "image_url", "image_url": {"url": one}} for one in urls]
    wanted = {"type": "text", "text": "What is it?"}
    source = {"type": "base64", "media_type": "image/png", "data": files[3]}
    items = [{"type": "input_image", "image_url": urls[4]}, {"type": "input_text", "text": "Well?"}]
    made: list[tuple[str, dict[str, object]]] = [
        (_CHAT, {"messages": _user([shown[0], wanted]), "max_tokens": longest_tokens, **sampled}),
        (_CHAT, {"messages": _user([shown[1], wanted, shown[2]]), "max_tokens": longest_tokens * 7 // 8, **sampled}),
        (_CHAT, {"messages": _user([wanted, shown[2]]), "max_tokens": longest_tokens * 3 // 4, "n": 2, **sampled}),
        (_CHAT, {"messages": _user("Tell me of the sea."), "max_tokens": longest_tokens * 5 // 8, **sampled}),
        ("/v1/messages", {"messages": _user([{"type": "image", "source": source}, wanted]), "temperature": 0, "max_tokens": longest_tokens * 13 // 16}),
        ("/v1/responses", {"input": _user(items), "temperature": 0, "max_output_tokens": longest_tokens * 11 // 16}),
        ("/api/chat", {"messages": [{"role": "user", "content": "Well?", "images": [files[5]]}], "options": {"temperature": 0, "num_predict": longest_tokens * 15 // 16}}),
    ]  # fmt: skip
    return [Question(path, {"model": model, **fields}) for path, fields in made]


def thoughtful_questions(model: str, *, longest_tokens: int = 240) -> list[Question]:
    """To a model whose template opens a thought: closed by a budget, by the model or not at all, and a grammar behind it.

    Answers are of ``longest_tokens`` and of fewer, none of the length of another.
    """
    sampled: dict[str, object] = {"temperature": 0.8, "seed": 3}
    wanted = {"type": "json_schema", "json_schema": {"name": "a", "schema": _SCHEMA}}
    enabled = {"type": "enabled", "budget_tokens": longest_tokens * 5 // 12}
    made: list[tuple[str, dict[str, object]]] = [
        (_CHAT, {"messages": _user("One."), "max_tokens": longest_tokens * 3 // 4, "thinking_token_budget": longest_tokens * 3 // 8, **sampled}),
        (_CHAT, {"messages": _user("Two."), "max_tokens": longest_tokens // 2, **sampled}),
        (_CHAT, {"messages": _user("Three."), "max_tokens": longest_tokens * 5 // 6, "n": 2, "thinking_token_budget": longest_tokens * 5 // 8, **sampled}),
        (_CHAT, {"messages": _user("Who?"), "max_tokens": longest_tokens, "thinking_token_budget": longest_tokens // 3, "response_format": wanted, **sampled}),
        ("/v1/messages", {"messages": _user("Four."), "temperature": 0, "max_tokens": longest_tokens * 2 // 3, "thinking": enabled}),
        ("/v1/responses", {"input": "Five.", "temperature": 0, "max_output_tokens": longest_tokens * 7 // 12}),
        ("/api/chat", {"messages": _user("Six."), "think": True, "options": {**sampled, "seed": 8, "num_predict": longest_tokens * 11 // 12}}),
    ]  # fmt: skip
    return [Question(path, {"model": model, **fields}) for path, fields in made]


def ask_streams_and_whole(
    url: str, asked: Sequence[Question], pool: Executor, *, streams: int = 2, whole: int
) -> list[Future[object]]:
    """Ask each question for so many streams at once and, the first so many, for a whole answer."""
    streamed = [pool.submit(one.ask_streamed, url) for _ in range(streams) for one in asked]
    return streamed + [pool.submit(one.ask, url) for one in asked[:whole]]


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


_TEXTS = (
    "content",
    "text",
    "thinking",
    "reasoning_content",
    "reasoning",
    "partial_json",
    "arguments",
    "delta",
)
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
