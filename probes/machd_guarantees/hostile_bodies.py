"""Bodies that a daemon has to refuse soon, or answer without holding up others."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass

from machd.errors import EngineFaultError
from machd_bench.server import LOOK_UP_TIMEOUT_S, Server

_COMPLETIONS = "/v1/completions"
_CHAT = "/v1/chat/completions"
_REFUSED = frozenset({400})
_TAKEN_OR_REFUSED = frozenset({200, 400, 413})

_DEPTH = 200_000
_CALLS_IN_A_MESSAGE = 128


@dataclass(frozen=True, slots=True)
class Body:
    """A request, and the statuses that are a right answer to it."""

    name: str
    path: str
    data: bytes
    allowed: frozenset[int] = _REFUSED

    async def send(self, server: Server) -> float:
        """Send it and read the answer; seconds from the first byte sent to the last byte read.

        A body that gets no answer counts with the time after which the bench gave up.

        Raises:
            EngineFaultError: The answer has another status, or the connection broke.
        """
        started_s = server.clock.monotonic_s()
        try:
            exchange = await server.exchange(self.path, self.data)
        except TimeoutError:
            return LOOK_UP_TIMEOUT_S
        except OSError as error:
            raise EngineFaultError(f"{self.name}: the daemon broke off: {error}") from error
        if exchange.status not in self.allowed:
            raise EngineFaultError(f"{self.name}: HTTP {exchange.status}")
        return exchange.ended_s - started_s


def malformed_bodies(model_id: str) -> list[Body]:
    """Bodies that are no JSON, have another shape, or values out of range."""
    deep = "[" * _DEPTH + "]" * _DEPTH
    texts = {
        "an opening brace": "{",
        "no object": "[]",
        "trailing text": _completion(model_id) + "x",
        "a number of 5,000 digits": _completion(model_id, '"seed": ' + "9" * 5000),
        "a text for a number": _completion(model_id, '"temperature": "7"'),
        "a negative length": _completion(model_id, '"max_tokens": -2'),
        "half a surrogate pair": _completion(model_id, '"user": "\\ud800"'),
        "1,000 stops": _completion(model_id, '"stop": ' + json.dumps(["a"] * 1000)),
        "200,000 lists, never closed": "[" * _DEPTH,
        "200,000 lists in a field": _completion(model_id, f'"logit_bias": {deep}'),
    }
    bodies = [Body(name, _COMPLETIONS, text.encode()) for name, text in texts.items()]
    return [*bodies, Body("bytes that are no UTF-8", _COMPLETIONS, b'{"model": "\xff"}')]


def bad_schemas(model_id: str) -> list[Body]:
    """Schemas, patterns and grammars that cannot be compiled, or not within the bounds."""
    levels = 10_000
    schemas = {
        "a type that is none": '{"type": "text"}',
        "a reference to nowhere": '{"$ref": "#/$defs/none"}',
        "references in a circle": (
            '{"$ref": "#/$defs/a",'
            ' "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}'
        ),
        "recursion without an end": (
            '{"type": "object", "properties": {"x": {"$ref": "#"}}, "required": ["x"]}'
        ),
        "10,000 levels": '{"properties":{"a":' * levels + "{}" + "}}" * levels,
        "10,000 properties": json.dumps({"properties": {f"p{i}": {} for i in range(levels)}}),
        "10,000 values": json.dumps({"enum": [f"value {i * 7919}" for i in range(levels)]}),
        "10,000 alternatives": json.dumps({"anyOf": [{"const": i} for i in range(levels)]}),
        "300,000 characters": json.dumps({"title": "x" * 300_000}),
    }
    fields = [(name, f'"guided_json": {source}') for name, source in schemas.items()]
    fields += [
        ("a pattern with a look-ahead", '"guided_regex": "(?=a)b"'),
        ("a pattern of 100,000 characters", f'"guided_regex": "{"a" * 100_000}"'),
        ("a grammar of many readings", f'"guided_grammar": {json.dumps(_many_readings(1500))}'),
    ]
    return [
        Body(name, _COMPLETIONS, _completion(model_id, field).encode()) for name, field in fields
    ]


def heavy_bodies(model_id: str) -> list[Body]:
    """Bodies of nearly 2 MB that every model takes or refuses: deep nesting, and a long text."""
    deep = "[" * 900_000 + "]" * 900_000
    tokenise = json.dumps({"model": model_id, "prompt": "ab " * 600_000})
    return [
        Body("900,000 lists", _COMPLETIONS, deep.encode(), _TAKEN_OR_REFUSED),
        Body("a text of 1.8 MB", "/tokenize", tokenise.encode(), _TAKEN_OR_REFUSED),
    ]


def heavy_conversations(model_id: str) -> list[Body]:
    """Conversations of nearly 2 MB that are nothing but structure: past calls of tools."""
    flat = '{"a":[' + ",".join(["{}"] * 600_000) + "]}"
    nested = '{"a":[' + ",".join(["[" * 60 + "]" * 60] * 15_000) + "]}"
    histories = {
        "600,000 objects in a call": [flat],
        "15,000 nested lists in a call": [nested],
        "19,000 calls": ['{"a":1}'] * 19_000,
    }
    return [
        Body(name, _CHAT, _conversation(model_id, calls), _TAKEN_OR_REFUSED)
        for name, calls in histories.items()
    ]


def _completion(model_id: str, *fields: str) -> str:
    """A request for two tokens with more fields, which are JSON already."""
    whole = json.dumps({"model": model_id, "prompt": "hi", "max_tokens": 2})
    return f"{whole[:-1]}{''.join(f', {one}' for one in fields)}}}"


def _conversation(model_id: str, calls: Iterable[str]) -> bytes:
    """A request whose history has calls with these arguments."""
    told = [
        {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
        for arguments in calls
    ]
    messages = [
        {"role": "assistant", "tool_calls": told[start : start + _CALLS_IN_A_MESSAGE]}
        for start in range(0, len(told), _CALLS_IN_A_MESSAGE)
    ]
    return json.dumps({"model": model_id, "max_tokens": 1, "messages": messages}).encode()


def _many_readings(ways: int) -> str:
    """A grammar of which a text of a few letters has countless readings."""
    ways_of_s = " | ".join(f"s x{i} s" for i in range(ways))
    rules = "\n".join(f'x{i}: "a"? | s' for i in range(ways))
    return f's: {ways_of_s} | "a"\nstart: s\n{rules}'
