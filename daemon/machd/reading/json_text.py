"""Incremental parser of a model's JSON.

Errors of models inside strings are corrected at once, because text that was streamed is
final: control characters that have to be escaped, and backslashes that escape nothing.
"""

from __future__ import annotations

import json
import re
from enum import Enum, auto

_WHITESPACE = " \t\r\n"
_SCALAR = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?|true|false|null")


class NotJsonError(ValueError):
    """The text is no JSON."""


class _Expected(Enum):
    VALUE = auto()
    FIRST_VALUE = auto()
    KEY = auto()
    FIRST_KEY = auto()
    COLON = auto()
    NEXT = auto()
    NOTHING = auto()


class JsonText:
    """Parses one JSON value and returns its corrected text.

    Attributes:
        closed_key: The character just read ended a key.
        closed_string: The character just read ended a string that is a value.
    """

    def __init__(self) -> None:
        self._expected = _Expected.VALUE
        self._open: list[str] = []
        self._is_key = False
        self._in_string = False
        self._escape = ""
        self._scalar = ""
        self._string: list[str] = []
        self.closed_key = False
        self.closed_string = False

    @property
    def depth(self) -> int:
        """Number of open objects and arrays."""
        return len(self._open)

    @property
    def string(self) -> str:
        """Text of the string that is open or was last closed, quotes left out."""
        return "".join(self._string)

    @property
    def expects_value(self) -> bool:
        """Return whether the next character may begin an object's value."""
        return self._expected is _Expected.VALUE and not self._in_string and not self._scalar

    @property
    def open_key(self) -> str | None:
        """The beginning of a key that is not closed yet; None outside of keys."""
        return self.string if self._in_string and self._is_key else None

    @property
    def open_string(self) -> str | None:
        """The beginning of a string that is a value and not closed yet; None outside of those."""
        return self.string if self._in_string and not self._is_key else None

    @property
    def is_done(self) -> bool:
        """Return whether the value has ended."""
        return self._expected is _Expected.NOTHING

    def push(self, character: str) -> str:
        """Parse text, and return the text that is final; a number or word is final once it has ended.

        Raises:
            NotJsonError: The text cannot continue the JSON value.
        """
        self.closed_key = self.closed_string = False
        if self._in_string:
            return self._push_string(character)
        if self._scalar and character not in _WHITESPACE + ",]}":
            self._scalar += character
            return ""
        scalar, self._scalar = self._scalar, ""
        if scalar:
            if _SCALAR.fullmatch(scalar) is None:
                raise NotJsonError
            self._value_ended()
        self._push_between(character)
        return scalar + ("" if self._scalar else character)

    def _push_string(self, character: str) -> str:
        if self._escape:
            return self._push_escape(character)
        if character == '"':
            self._in_string = False
            self.closed_key, self.closed_string = self._is_key, not self._is_key
            if self._is_key:
                self._expected = _Expected.COLON
            else:
                self._value_ended()
            return character
        self._string.append(character)
        if character == "\\":
            self._escape = character
            return character
        return character if character >= " " else json.dumps(character)[1:-1]

    def _push_escape(self, character: str) -> str:
        self._escape += character
        if self._escape[1] == "u":
            if len(self._escape) > 2 and character not in "0123456789abcdefABCDEF":
                raise NotJsonError
            self._escape = self._escape if len(self._escape) < 6 else ""
            self._string.append(character)
            return character
        self._escape = ""
        mended = (
            character
            if character in '"\\/bfnrt'
            else "\\" + json.dumps(character, ensure_ascii=False)[1:-1]
        )
        self._string.append(mended)
        return mended

    def _push_between(self, character: str) -> None:
        if character in _WHITESPACE:
            return
        match self._expected:
            case _Expected.VALUE | _Expected.FIRST_VALUE:
                self._begin_value(character)
            case _Expected.KEY | _Expected.FIRST_KEY:
                self._begin_key(character)
            case _Expected.COLON if character == ":":
                self._expected = _Expected.VALUE
            case _Expected.NEXT if character == ",":
                is_object = self._open[-1] == "}"
                self._expected = _Expected.KEY if is_object else _Expected.VALUE
            case _Expected.NEXT if character == self._open[-1]:
                self._close()
            case _:
                raise NotJsonError

    def _begin_value(self, character: str) -> None:
        if character == "{":
            self._open.append("}")
            self._expected = _Expected.FIRST_KEY
        elif character == "[":
            self._open.append("]")
            self._expected = _Expected.FIRST_VALUE
        elif character == "]" and self._expected is _Expected.FIRST_VALUE:
            self._close()
        elif character == '"':
            self._begin_string(is_key=False)
        elif character in "-0123456789tfn":
            self._scalar = character
        else:
            raise NotJsonError

    def _begin_key(self, character: str) -> None:
        if character == '"':
            self._begin_string(is_key=True)
        elif character == "}" and self._expected is _Expected.FIRST_KEY:
            self._close()
        else:
            raise NotJsonError

    def _begin_string(self, *, is_key: bool) -> None:
        self._in_string, self._is_key = True, is_key
        self._string.clear()

    def _close(self) -> None:
        self._open.pop()
        self._value_ended()

    def _value_ended(self) -> None:
        self._expected = _Expected.NEXT if self._open else _Expected.NOTHING
