"""Requests for answers of a certain shape, all different, and how to tell whether one has it.

Shapes are small: a little model that rambles has to come to their ends within some dozen tokens.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass

from support.clients.json_schema_cases import is_valid

_CHAT = "/v1/chat/completions"
_COMPLETIONS = "/v1/completions"
_NAMES = ("name", "age", "city", "tags", "mood", "size", "code", "when", "is_open", "parent_id")
_WORDS = ("red", "green", "blue", "glad", "sad", "small", "tall", "Paris", "Rome", "yes", "no")
_PATTERNS = ("^[A-Z][a-z]{1,6}$", "^[0-9]{3}-[a-z]{2}$", "^(a|b)+c$", "^[a-f0-9]{1,8}$")
_TOPICS = ("a person", "a city", "an animal", "a parcel", "a meal", "a planet", "a book")


@dataclass(frozen=True, slots=True)
class ShapedRequest:
    """A request, and what its answer has to be.

    Attributes:
        body: As JSON, without the model's name.
        has_shape: Whether a text is what was asked for.
    """

    path: str
    body: dict[str, object]
    has_shape: Callable[[str], bool]


def varied_schema(rng: random.Random, depth: int = 2) -> dict[str, object]:
    """A closed object of one to three properties, some of them optional, some of them objects."""
    names = rng.sample(_NAMES, rng.randint(1, depth + 1))
    required = [name for name in names if rng.random() < 0.7]
    return {
        "type": "object",
        "properties": {name: _value(rng, depth - 1) for name in names},
        "required": required,
        "additionalProperties": False,
    }


def _value(rng: random.Random, depth: int) -> dict[str, object]:
    kinds: list[Callable[[random.Random], dict[str, object]]] = [
        _integer,
        _number,
        _string,
        _pattern,
        _words,
        lambda _rng: {"type": "boolean"},
        lambda _rng: {"type": "string", "format": rng.choice(("time", "ipv4", "uuid"))},
        lambda _rng: {"anyOf": [_integer(rng), {"type": "null"}]},
    ]
    if depth > 0:
        kinds += [lambda _rng: varied_schema(rng, depth), lambda _rng: _array(rng, depth)] * 2
    return rng.choice(kinds)(rng)


def _integer(rng: random.Random) -> dict[str, object]:
    low = rng.randint(-50, 50)
    return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 500)}


def _number(rng: random.Random) -> dict[str, object]:
    # Without a bound of digits, a row may write 0.000... for as long as it has tokens.
    return {"type": "number", "minimum": 0, "maximum": rng.randint(1, 9), "multipleOf": 0.01}


def _string(rng: random.Random) -> dict[str, object]:
    shortest = rng.randint(0, 3)
    return {"type": "string", "minLength": shortest, "maxLength": shortest + rng.randint(0, 7)}


def _pattern(rng: random.Random) -> dict[str, object]:
    return {"type": "string", "pattern": rng.choice(_PATTERNS), "maxLength": 12}


def _words(rng: random.Random) -> dict[str, object]:
    values: list[object] = [*rng.sample(_WORDS, 3), rng.randint(0, 9), None]
    return {"enum": values[: rng.randint(1, 5)]}


def _array(rng: random.Random, depth: int) -> dict[str, object]:
    shortest = rng.randint(0, 2)
    return {
        "type": "array",
        "items": _value(rng, depth - 1),
        "minItems": shortest,
        "maxItems": shortest + rng.randint(0, 2),
    }


def shaped_requests(count: int, rng: random.Random, *, max_tokens: int) -> list[ShapedRequest]:
    """Two thirds with schemas, half of those as chats; the rest patterns, choices and grammars."""
    kinds = (_chat_schema, _guided_json, _chat_schema, _guided_json, _chat_guided, _guided)
    return [kinds[number % len(kinds)](rng, _common(rng, max_tokens)) for number in range(count)]


def _common(rng: random.Random, max_tokens: int) -> dict[str, object]:
    return {
        "max_tokens": max_tokens,
        "temperature": rng.choice((0.0, 0.7, 1.0, 1.4)),
        "seed": rng.randrange(2**31),
    }


def _question(rng: random.Random) -> str:
    return f"Describe {rng.choice(_TOPICS)}, number {rng.randrange(1000)}."


def _chat(rng: random.Random, common: dict[str, object]) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": _question(rng)}], **common}


def _chat_schema(rng: random.Random, common: dict[str, object]) -> ShapedRequest:
    schema = varied_schema(rng)
    shape = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    body = {**_chat(rng, common), "response_format": shape}
    return ShapedRequest(_CHAT, body, lambda text: is_valid(text, schema))


def _guided_json(rng: random.Random, common: dict[str, object]) -> ShapedRequest:
    schema = varied_schema(rng)
    source: object = json.dumps(schema) if rng.random() < 0.5 else schema
    body = {"prompt": _question(rng), **common, "guided_json": source}
    return ShapedRequest(_COMPLETIONS, body, lambda text: is_valid(text, schema))


def _guided(rng: random.Random, common: dict[str, object]) -> ShapedRequest:
    fields, has_shape = rng.choice((_regex, _choice, _grammar))(rng)
    return ShapedRequest(_COMPLETIONS, {"prompt": _question(rng), **common, **fields}, has_shape)


def _chat_guided(rng: random.Random, common: dict[str, object]) -> ShapedRequest:
    fields, has_shape = rng.choice((_regex, _choice, _grammar))(rng)
    return ShapedRequest(_CHAT, {**_chat(rng, common), **fields}, has_shape)


def _regex(rng: random.Random) -> tuple[dict[str, object], Callable[[str], bool]]:
    pattern = rng.choice(
        (
            rf"[a-z]{{{rng.randint(1, 5)},9}}",
            rf"[0-9]{{{rng.randint(1, 4)}}}-[0-9]{{2}}",
            rf"(ab|cd){{1,{rng.randint(1, 4)}}}(x|y)?",
        )
    )
    return {"guided_regex": pattern}, lambda text: re.fullmatch(pattern, text) is not None


def _choice(rng: random.Random) -> tuple[dict[str, object], Callable[[str], bool]]:
    choices = [f"{word} {rng.randrange(100)}" for word in rng.sample(_WORDS, rng.randint(1, 5))]
    return {"structured_outputs": {"choice": choices}}, choices.__contains__


def _grammar(rng: random.Random) -> tuple[dict[str, object], Callable[[str], bool]]:
    most = rng.randint(1, 4)
    lark = f'start: term ("+" term){{0,{most}}}\nterm: /[0-9]{{1,3}}/ | "(" term ")"'
    return {"guided_grammar": lark}, lambda text: _is_sum(text, most)


def _is_sum(text: str, most: int) -> bool:
    terms = text.split("+")
    return len(terms) <= most + 1 and all(map(_is_term, terms))


def _is_term(text: str) -> bool:
    while text.startswith("(") and text.endswith(")"):
        text = text[1:-1]
    return re.fullmatch("[0-9]{1,3}", text) is not None
