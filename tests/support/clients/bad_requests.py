"""One mistake in every dialect: schemas, tools and turns that have to be refused with a 400.

Plain data: an endpoint's path, a name and the bytes. The mistakes are of a kind that only shows
once a body is read: inside of a schema, between two tools, in the order of the turns.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
INFILL = "/infill"
OLLAMA_CHAT = "/api/chat"
PATHS = (CHAT, COMPLETIONS, RESPONSES, MESSAGES, INFILL, OLLAMA_CHAT)

_HOLE = "@"
_USER = [{"role": "user", "content": "hi"}]
_TURNS_AND_LIMIT: dict[str, dict[str, object]] = {
    CHAT: {"messages": _USER, "max_tokens": 2},
    COMPLETIONS: {"prompt": "hi", "max_tokens": 2},
    RESPONSES: {"input": _USER, "max_output_tokens": 2, "store": False},
    MESSAGES: {"messages": _USER, "max_tokens": 2},
    INFILL: {"input_prefix": "hi", "input_suffix": "ho", "max_tokens": 2},
    OLLAMA_CHAT: {"messages": _USER, "options": {"num_predict": 2}},
}


@dataclass(frozen=True, slots=True)
class BadRequest:
    """A body and its endpoint."""

    path: str
    name: str
    body: bytes

    def __str__(self) -> str:
        """A test's id."""
        return f"{self.path}: {self.name}"


def valid_body(path: str, **fields: object) -> dict[str, object]:
    """A body that asks for two tokens, with some fields replaced or added."""
    return {"model": "fake", **_TURNS_AND_LIMIT[path], **fields}


def error_of(path: str, body: dict[str, object]) -> dict[str, object]:
    """The error in a dialect's own envelope, which has to be whole; Ollama's has a message alone."""
    error = body["error"]
    if path == OLLAMA_CHAT:
        assert body.keys() == {"error"}
        assert isinstance(error, str)
        return {"message": error, "type": "invalid_request_error"}
    assert isinstance(error, dict)
    if path == MESSAGES:
        assert body.keys() == {"type", "error", "request_id"}
        assert body["type"] == "error"
        assert error.keys() == {"type", "message"}
    else:
        assert body.keys() == {"error"}
        assert error.keys() == {"message", "type", "param", "code"}
    return error


def _sent(path: str, **fields: object) -> bytes:
    return json.dumps(valid_body(path, **fields)).encode()


def _with_schema(path: str, source: str) -> bytes:
    """A body that asks for a schema's JSON; the source may be deeper than this Python can write."""
    format_: dict[str, object] = {"type": "json_schema", "schema": _HOLE}
    named = {"name": "n", "schema": _HOLE}
    asked: dict[str, dict[str, object]] = {
        CHAT: {"response_format": {"type": "json_schema", "json_schema": named}},
        COMPLETIONS: {"guided_json": _HOLE},
        INFILL: {"guided_json": _HOLE},
        RESPONSES: {"text": {"format": {**format_, "name": "n"}}},
        MESSAGES: {"output_config": {"format": format_}},
        OLLAMA_CHAT: {"format": _HOLE},
    }
    return _sent(path, **asked[path]).replace(json.dumps(_HOLE).encode(), source.encode())


def _deep(levels: int) -> str:
    return '{"type":"object","properties":{"a":' * levels + "{}" + "}}" * levels


_SCHEMAS: dict[str, str] = {
    "an unknown type": '{"type": "strin"}',
    "a reference to nowhere": '{"$ref": "#/$defs/none"}',
    "a reference elsewhere": '{"$ref": "http://127.0.0.1:1/x.json"}',
    "a reference to a file": '{"$ref": "file:///etc/hostname"}',
    "a reference to itself": '{"$ref": "#"}',
    "references in a circle": (
        '{"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}'
    ),
    "a circle through allOf": '{"allOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"anyOf": [{"$ref": "#"}]}}}',
    "recursion without an end": '{"type": "object", "properties": {"x": {"$ref": "#"}}, "required": ["x"]}',
    "a pattern with a look-ahead": '{"type": "string", "pattern": "^(?!a)b"}',
    "a pattern that is none": '{"type": "string", "pattern": "("}',
    "an enum of 10,000 values": json.dumps({"enum": [f"value {i * 7919}" for i in range(10_000)]}),
    "10,000 properties": json.dumps({"properties": {f"p{i}": {} for i in range(10_000)}}),
    "10,000 alternatives": json.dumps({"anyOf": [{"const": i} for i in range(10_000)]}),
    "10,000 levels": _deep(10_000),
    "100 levels": _deep(100),
    "10,000 lists": '{"allOf": ' + "[" * 10_000 + "]" * 10_000 + "}",
    "300,000 characters": json.dumps({"title": "x" * 300_000}),
    "no object": "[1]",
    "a number beyond all": '{"minimum": 1e999}',
    "nothing satisfies it": '{"type": "integer", "minimum": 3, "maximum": 2}',
}

_HEAVY_SCHEMAS: dict[str, str] = {
    "a pattern that counts far": '{"type": "string", "pattern": "(x{1,1000}){1,1000}"}',
    "a pattern of 60,000 characters": json.dumps(
        {"type": "string", "pattern": "(a|b)*c{3,9}" * 5000}
    ),
    "nested stars": '{"type": "string", "pattern": "^(a+)+$"}',
    "stars of alternatives": '{"type": "string", "pattern": "^(a|a)*(a|aa)*b$"}',
    "states that explode": '{"type": "string", "pattern": "(.*a){20}"}',
    "states that explode later": '{"type": "string", "pattern": "(.*a.{12}){3}[a-z]*z{200}"}',
    "1,000 properties": json.dumps({"properties": {f"p{i}": {} for i in range(1000)}}),
    "4,000 values": json.dumps({"enum": [f"value {i * 7919}" for i in range(4000)]}),
    "30 levels": _deep(30),
    "long strings": '{"type": "string", "minLength": 30000, "maxLength": 60000}',
    "long lists": '{"type": "array", "items": {"enum": [1, 2]}, "minItems": 5000, "maxItems": 9999}',
}


def _tool(path: str, name: str) -> dict[str, object]:
    parameters = {"type": "object", "properties": {"a": {"type": "integer"}}}
    if path == MESSAGES:
        return {"name": name, "input_schema": parameters}
    function = {"name": name, "parameters": parameters}
    return {
        "type": "function",
        **({"function": function} if path in (CHAT, OLLAMA_CHAT) else function),
    }


def _choice_of(path: str, name: str) -> dict[str, object]:
    if path == MESSAGES:
        return {"type": "tool", "name": name}
    return {
        "type": "function",
        **({"function": {"name": name}} if path == CHAT else {"name": name}),
    }


def _any_call(path: str) -> object:
    return {"type": "any"} if path == MESSAGES else "required"


_CHOICES = ("a choice", "a strict tool", "a tool of 10,000")
"""Mistakes that only a call which has to be made brings to light; Ollama's API has no such call."""


def _tool_with(path: str, source: str) -> bytes:
    """A call of a tool whose parameters are a schema's source is asked for, without thoughts."""
    tool = _tool(path, "f")
    holder = tool["function"] if path == CHAT else tool
    assert isinstance(holder, dict)
    holder["input_schema" if path == MESSAGES else "parameters"] = _HOLE
    thoughtless: dict[str, dict[str, object]] = {
        CHAT: {"reasoning_effort": "none"},
        RESPONSES: {"reasoning": {"effort": "none"}},
        MESSAGES: {},
    }
    sent = _sent(path, tools=[tool], tool_choice=_choice_of(path, "f"), **thoughtless[path])
    return sent.replace(json.dumps(_HOLE).encode(), source.encode())


_UNIQUE = '{"type": "object", "properties": {"a": {"type": "array", "uniqueItems": true}}}'

_CIRCLE = '{"type": "object", "properties": {"a": {"$ref": "#/properties/a"}}, "required": ["a"]}'

_TOOL_MISTAKES: dict[str, Callable[[str], bytes]] = {
    "two tools of one name": lambda path: _sent(path, tools=[_tool(path, "f"), _tool(path, "f")]),
    "a choice that names no tool": lambda path: _sent(
        path, tools=[_tool(path, "f")], tool_choice=_choice_of(path, "g")
    ),
    "a choice without tools": lambda path: _sent(path, tool_choice=_any_call(path)),
    "a tool whose name is a path": lambda path: _sent(path, tools=[_tool(path, "../f")]),
    "too many tools": lambda path: _sent(path, tools=[_tool(path, f"f{i}") for i in range(513)]),
    "a tool of an unknown kind": lambda path: _sent(path, tools=[{"type": "magic", "name": "f"}]),
    "a tool of 10,000 levels": lambda path: _tool_with(path, _deep(10_000)),
    "a tool of 10,000 properties": lambda path: _tool_with(
        path, json.dumps({"type": "object", "properties": {f"p{i}": {} for i in range(10_000)}})
    ),
}


def _ollama_call(arguments: object) -> dict[str, object]:
    call = {"function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "tool_calls": [call]}


def _shown(part: dict[str, object]) -> list[dict[str, object]]:
    return [{"role": "user", "content": [part]}]


_IMAGE_URL = "data:image/png;base64,AAAA"

_TURN_MISTAKES: dict[str, tuple[tuple[str, str, object], ...]] = {
    "no turn at all": (
        (CHAT, "messages", []),
        (MESSAGES, "messages", []),
    ),
    "arguments as text": ((OLLAMA_CHAT, "messages", [_ollama_call("{}")]),),
    "arguments that are a list": ((OLLAMA_CHAT, "messages", [_ollama_call([1])]),),
    "a video to a text model": (
        (
            CHAT,
            "messages",
            _shown({"type": "video_url", "video_url": {"url": "https://a.example/"}}),
        ),
    ),
    "an image to a text model": (
        (CHAT, "messages", _shown({"type": "image_url", "image_url": {"url": _IMAGE_URL}})),
        (RESPONSES, "input", _shown({"type": "input_image", "image_url": _IMAGE_URL})),
        (
            MESSAGES,
            "messages",
            _shown(
                {
                    "type": "image",
                    "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"},
                }
            ),
        ),
        (OLLAMA_CHAT, "messages", [{"role": "user", "images": ["AAAA"]}]),
    ),
    "an image that is no base64": (
        (CHAT, "messages", _shown({"type": "image_url", "image_url": f"{_IMAGE_URL}!"})),
        (RESPONSES, "input", _shown({"type": "input_image", "image_url": f"{_IMAGE_URL}!"})),
        (OLLAMA_CHAT, "messages", [{"role": "user", "images": ["!"]}]),
    ),
    "an unknown role": (
        (CHAT, "messages", [{"role": "root", "content": "hi"}]),
        (RESPONSES, "input", [{"role": "root", "content": "hi"}]),
        (MESSAGES, "messages", [{"role": "tool", "content": "hi"}]),
        (OLLAMA_CHAT, "messages", [{"role": "root", "content": "hi"}]),
    ),
    "a result without a call": (
        (CHAT, "messages", [*_USER, {"role": "tool", "tool_call_id": "c", "content": "4"}]),
        (RESPONSES, "input", [{"type": "function_call_output", "call_id": "c", "output": "4"}]),
        (
            MESSAGES,
            "messages",
            [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c"}]}],
        ),
    ),
    "a call without a result": (
        (
            MESSAGES,
            "messages",
            [
                *_USER,
                {
                    "role": "assistant",
                    "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}],
                },
                *_USER,
            ],
        ),
    ),
    "a reference to an item that is not there": (
        (RESPONSES, "input", [{"type": "item_reference", "id": "msg_none"}]),
    ),
}

BAD_REQUESTS: tuple[BadRequest, ...] = (
    *(
        BadRequest(path, f"schema: {name}", _with_schema(path, source))
        for path in PATHS
        for name, source in _SCHEMAS.items()
    ),
    *(
        BadRequest(path, name, make(path))
        for path in (CHAT, RESPONSES, MESSAGES, OLLAMA_CHAT)
        for name, make in _TOOL_MISTAKES.items()
        if path != OLLAMA_CHAT or not name.startswith(_CHOICES)
    ),
    *(
        BadRequest(path, name, _sent(path, **{field: value}))
        for name, places in _TURN_MISTAKES.items()
        for path, field, value in places
    ),
)
"""All of them are refused with a 400."""

HEAVY_REQUESTS: tuple[BadRequest, ...] = (
    *(
        BadRequest(path, name, _with_schema(path, source))
        for path in PATHS
        for name, source in _HEAVY_SCHEMAS.items()
    ),
    *(
        BadRequest(path, f"a tool with {name}", _tool_with(path, source))
        for path in (CHAT, RESPONSES, MESSAGES)
        for name, source in (("an unsupported keyword", _UNIQUE), ("a reference circle", _CIRCLE))
    ),
)
"""Either refused or answered, and soon."""
