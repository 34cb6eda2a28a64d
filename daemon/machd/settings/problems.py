"""Messages about wrong settings: the value, the problem and the fix.

Pure wording. The values of secret keys are never in it.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable
from types import MappingProxyType

from pydantic_core import ErrorDetails

from machd.settings.keys import SettingKey, ValueKind

_MAX_SHOWN_CHARS = 60
_MAX_NAME_CHARS = 256
"""Of a path or a name in a message: longer than real ones."""

_MAX_COMPARED_CHARS = 64
"""Of a misspelt name: comparing takes time with the square of its length."""

_WANTED = MappingProxyType(
    {
        ValueKind.BOOLEAN: "true or false",
        ValueKind.INTEGER: "a whole number",
        ValueKind.NUMBER: "a number",
        ValueKind.TEXT: "text",
        ValueKind.LIST: "a list",
    }
)


def value_problem(key: SettingKey, error: ErrorDetails, *, is_toml: bool) -> str:
    """Say what is wrong with one value, such as ``0 is too small, the least is 1``.

    ``is_toml`` if the value was written as TOML, where its type counts.
    """
    value = error["input"]
    match error["type"]:
        case "greater_than_equal":
            return f"{_number(key, value)} is too small, the least is {key.least:.15g}"
        case "int_parsing_size" if not f"{value}".lstrip().startswith("-") and key.most is not None:
            return f"{_number(key, value)} is too large, the most is {key.most:.15g}"
        case "less_than_equal":
            return f"{_number(key, value)} is too large, the most is {key.most:.15g}"
        case "literal_error":
            return f"{_shown(key, value)} is none of {', '.join(key.choices)}"
        case "value_error":
            return f"{_shown(key, value)} {error['ctx']['error']}"
        case _:
            is_item = key.is_list and len(error["loc"]) > 1
            kind = ValueKind.TEXT if is_item else key.kind
            wanted = " or ".join((*key.words, _WANTED[kind]))
            fix = _toml_fix(key, kind, value) if is_toml else ""
            return f"{_shown(key, value)} is not {wanted}{fix}"


def nearest(word: str, known: Iterable[str]) -> str:
    """The known spelling that ``word`` is most like; there has to be one."""
    return difflib.get_close_matches(word[:_MAX_COMPARED_CHARS], list(known), n=1, cutoff=0.0)[0]


def shortened(text: str, max_chars: int = _MAX_NAME_CHARS) -> str:
    """The text as far as a message shows it."""
    return text if len(text) <= max_chars else f"{text[: max_chars - 1]}…"


def printable(text: str) -> str:
    """The text with a mark for each character that could break a line or garble a terminal."""
    return "".join(
        letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text
    )


def _toml_fix(key: SettingKey, kind: ValueKind, value: object) -> str:
    """Return the right way to write a value of the wrong TOML type."""
    if key.words and isinstance(value, str) and not value.strip().isdecimal():
        return ""  # a misspelt word is not mended by taking its quotes away
    if kind is ValueKind.LIST and isinstance(value, str):
        return "; put it in brackets"
    if kind is ValueKind.TEXT and isinstance(value, bool | int | float):
        return "; put it in quotes"
    if isinstance(value, str):
        return "; write it without quotes"
    return ""


def _number(key: SettingKey, value: object) -> str:
    """A number as it was given: a variable holds text, but was read as a number."""
    if isinstance(value, str) and not key.is_secret:
        return shortened(value.strip(), _MAX_SHOWN_CHARS)
    return _shown(key, value)


def _shown(key: SettingKey, value: object) -> str:
    """A value on one line, cut if it is long, whatever characters are in it."""
    if key.is_secret:
        return "the value (hidden)"
    try:
        text = json.dumps(value, ensure_ascii=False, default=str)
        if not text.isprintable():
            text = json.dumps(value, default=str)
    except (ValueError, RecursionError):
        return "the value"  # an integer of too many digits for Python to print, or deep tables
    return shortened(text, _MAX_SHOWN_CHARS)
