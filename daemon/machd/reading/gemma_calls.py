"""Gemma's calls: ``call:name{key:value,…}``, keys bare and strings between markers of their own.

mlx-lm's parsers of the two formats read strings with braces, nested objects or lists wrongly, or in
quadratic time, so they are read here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from machd.reading.tagged_calls import OpenValueError

GEMMA_QUOTES: Mapping[str, str] = {"function_gemma": "<escape>", "gemma4": '<|"|>'}
"""The marker on both sides of a string, by mlx-lm's name of the format."""

_MAX_DEPTH = 64
_CALL = re.compile(r"\s*call:([\w.-]+)\s*(?=\{)")
_KEY = re.compile(r"\s*([^\s:,{}\[\]<>\"]+)\s*:")
_BARE = re.compile(r"[^,{}\[\]<>\"]*")
_DECODER = json.JSONDecoder(strict=False)


def read_gemma_calls(quote: str, text: str) -> list[tuple[str, Mapping[str, object]]]:
    """Read names and arguments of calls; ``quote`` stands on both sides of a string.

    Raises:
        OpenValueError: The text ends inside a string.
        ValueError: Something else than calls is in it.
    """
    calls: list[tuple[str, Mapping[str, object]]] = []
    position = 0
    while text[position:].strip():
        found = _CALL.match(text, position)
        if found is None:
            raise ValueError("a call has to begin here")
        reader = _Reader(text, quote, found.end())
        arguments = reader.mapping()
        calls.append((found[1], arguments))
        position = reader.position
    return calls


@dataclass
class _Reader:
    """Parser of the values of one text, from a position on."""

    text: str
    quote: str
    position: int
    depth: int = field(default=0, init=False)

    def mapping(self) -> dict[str, object]:
        found: dict[str, object] = {}
        self._open("{")
        while not self._closes("}"):
            if found:
                self._take(",")
            key = self._key()
            found[key] = self._value()
        return found

    def _list(self) -> list[object]:
        found: list[object] = []
        self._open("[")
        while not self._closes("]"):
            if found:
                self._take(",")
            found.append(self._value())
        return found

    def _key(self) -> str:
        self._skip()
        if self.text.startswith(self.quote, self.position):
            key = self._string()
            self._skip()
            self._take(":")
            return key
        match = _KEY.match(self.text, self.position)
        if match is None:
            raise ValueError("a key has to stand here")
        self.position = match.end()
        return match[1]

    def _value(self) -> object:
        self._skip()
        if self.text.startswith(self.quote, self.position):
            return self._string()
        match self.text[self.position : self.position + 1]:
            case "{":
                return self.mapping()
            case "[":
                return self._list()
            case '"':
                value, self.position = _DECODER.raw_decode(self.text, self.position)
                return str(value)
            case _:
                return self._bare()

    def _string(self) -> str:
        start = self.position + len(self.quote)
        end = self.text.find(self.quote, start)
        if end < 0:
            raise OpenValueError
        self.position = end + len(self.quote)
        return self.text[start:end]

    def _bare(self) -> object:
        match = _BARE.match(self.text, self.position)
        assert match is not None, "the pattern matches nothing as well"
        word = match[0].strip()
        if not word:
            raise ValueError("a value has to stand here")
        self.position = match.end()
        try:
            value: object = json.loads(word)
        except ValueError:
            if self.quote != GEMMA_QUOTES["function_gemma"]:
                raise
            return word
        return value

    def _open(self, character: str) -> None:
        self.depth += 1
        if self.depth > _MAX_DEPTH:
            raise ValueError("it is nested too deep")
        self._take(character)

    def _closes(self, character: str) -> bool:
        self._skip()
        if not self.text.startswith(character, self.position):
            return False
        self.position += 1
        self.depth -= 1
        return True

    def _take(self, character: str) -> None:
        self._skip()
        if not self.text.startswith(character, self.position):
            raise ValueError(f"{character} has to stand here")
        self.position += 1

    def _skip(self) -> None:
        while self.text[self.position : self.position + 1] in (" ", "\t", "\r", "\n"):
            self.position += 1
