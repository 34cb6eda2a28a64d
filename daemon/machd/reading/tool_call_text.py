"""Incremental parser of calls in JSON.

A client sees a call's name as soon as it is known and its arguments as they are written. That needs
``{"name": ..., "arguments": {...}}`` in this order; any other order or shape is read when its object
ends. Everything goes by the character, so how the text was cut changes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Protocol

from machd.engine.protocol.chat_format import ParsedToolCall, parsed_call
from machd.reading.json_text import JsonText, NotJsonError

_WHITESPACE = " \t\r\n"
_SEPARATORS = ",;]"
_ARGUMENTS = ("arguments", "parameters")
_OBJECTS = (*_ARGUMENTS, "function")
_KEYS = (*_OBJECTS, "name", "type", "id")


class CallSink(Protocol):
    """A receiver of calls while they are parsed."""

    def start(self, name: str) -> None:
        """Begin a call to ``name``."""
        ...

    def arguments(self, text: str) -> None:
        """Add JSON text of the call's arguments."""
        ...

    def end(self) -> None:
        """End the call."""
        ...


class _JsonCall:
    """One object that may be a call.

    With ``streams`` the sink gets arguments as they are written; else when they are whole.

    Attributes:
        raw: Its text so far, as it was written.
        is_started: The sink knows of the call.
    """

    def __init__(self, sink: CallSink, names: frozenset[str], *, streams: bool) -> None:
        self._sink = sink
        self._names = names
        self._streams = streams
        self._json = JsonText()
        self._mended: list[str] = []
        self._key = ""
        self._name: str | None = None
        self._is_in_arguments = False
        self._arguments: list[str] = []
        self.raw: list[str] = []
        self.is_started = False

    @property
    def is_done(self) -> bool:
        return self._json.is_done

    @property
    def can_be_call(self) -> bool:
        """Return whether an unfinished object can still turn out to be a call, by its keys so far."""
        json_text = self._json
        if json_text.depth > 1:
            return self._key in _OBJECTS and self._name in {None, *self._names}
        if (key := json_text.open_key) is not None:
            known = any(one.startswith(key) for one in _KEYS)
        elif (name := json_text.open_string) is not None and self._key == "name":
            return any(one.startswith(name) for one in self._names)
        else:
            known = not self._key or self._key in _KEYS
        return known and self._name in {None, *self._names}

    def push(self, text: str) -> int:
        """Return how many characters belong to the object.

        Raises:
            NotJsonError: The text is no JSON; the offending character belongs to it.
        """
        try:
            for position, character in enumerate(text):
                self.raw.append(character)
                self._push(character)
                if self._json.is_done:
                    return position + 1
            return len(text)
        finally:
            self._flush()

    def whole(self, *, needs_arguments: bool) -> ParsedToolCall | None:
        """Return the call of a complete object; None if it is no call of a known function."""
        try:
            value = json.loads("".join(self._mended))
            call = _call_in(value, needs_arguments=needs_arguments)
        except (ValueError, RecursionError):
            return None
        return call if call.name in self._names else None

    def _push(self, character: str) -> None:
        json_text = self._json
        begins_value = json_text.depth == 1 and json_text.expects_value
        if begins_value and character == "{" and self._is_ready():
            self._is_in_arguments = True
            if self._streams:
                self._start()
        mended = json_text.push(character)
        if self._is_in_arguments:
            self._push_arguments(mended)
        elif not self._has_arguments:
            self._mended.append(mended)
        if json_text.depth == 1 and json_text.closed_key:
            self._key = json_text.string
        elif json_text.depth == 1 and json_text.closed_string and self._key == "name":
            self._name = _unquoted(json_text.string)

    def _is_ready(self) -> bool:
        return not self._has_arguments and self._key in _ARGUMENTS and self._name in self._names

    @property
    def _has_arguments(self) -> bool:
        return self.is_started or self._is_in_arguments

    def show_beginning(self) -> None:
        """Give the sink the beginning of arguments that were cut."""
        if self._is_in_arguments and not self.is_started:
            self._start()
            self._flush()

    def _start(self) -> None:
        assert self._name is not None, "arguments of a call whose name is known"
        self.is_started = True
        self._sink.start(self._name)

    def _push_arguments(self, mended: str) -> None:
        self._arguments.append(mended)
        if self._json.depth == 1:
            self._is_in_arguments = False
            if not self.is_started:
                self._start()
            self._flush()
            self._sink.end()

    def _flush(self) -> None:
        if not self.is_started:
            return
        text = "".join(self._arguments)
        self._arguments.clear()
        if text:
            self._sink.arguments(text)


class JsonCalls:
    """Calls one after the other, or in an array, to the first text that is none.

    Args:
        sink: Receives the calls.
        names: Names of the functions that can be called.
        needs_arguments: An object without arguments is no call; where it may be one, calls stand
            between markers, and a brace too many behind one is left out.
        streams: The sink gets arguments as they are written; else a call when it is whole, and what
            cannot be read is text from its beginning.

    Attributes:
        found: Number of calls that the sink has received.
        is_over: Text that is no call was read.
    """

    def __init__(
        self, sink: CallSink, names: frozenset[str], *, needs_arguments: bool, streams: bool = True
    ) -> None:
        self._sink = sink
        self._names = names
        self._needs_arguments = needs_arguments
        self._streams = streams
        self._separators = _SEPARATORS if needs_arguments else _SEPARATORS + "}"
        self._call: _JsonCall | None = None
        self._between = ""
        self._is_in_array = False
        self.is_over = False
        self.found = 0

    @property
    def can_go_on(self) -> bool:
        """Return whether the text held back can still turn out to be a call."""
        return not self.is_over and (self._call is None or self._call.can_be_call)

    def push(self, text: str) -> str:
        """Return the text that is no call, as it was written; from the first such text on that is all text."""
        while text and not self.is_over:
            text = self._push_call(text) if self._call is not None else self._push_between(text)
        return text

    def show_beginning(self) -> None:
        """Give the sink the beginning of a call whose arguments were cut."""
        if self._call is not None:
            self._call.show_beginning()

    def finish(self) -> str:
        """Return the text held back, which cannot become a call any more."""
        call, self._call = self._call, None
        if call is not None and not call.is_started:
            return self._between + "".join(call.raw)
        # Without a call nothing was ever skipped; after one it was punctuation.
        return "" if self.found else self._between

    def _push_between(self, text: str) -> str:
        for position, character in enumerate(text):
            if character == "{":
                self._call = _JsonCall(self._sink, self._names, streams=self._streams)
                return text[position:]
            opens = character == "[" and not self._is_in_array and not self.found
            if not (
                opens or character in _WHITESPACE or (self.found and character in self._separators)
            ):
                return self._give_up(text[position:])
            self._is_in_array |= opens
            self._between += character
        return ""

    def _push_call(self, text: str) -> str:
        call = self._call
        assert call is not None
        was_started = call.is_started
        length = len(call.raw)
        try:
            used = call.push(text)
        except NotJsonError:
            self.found += call.is_started and not was_started
            self._call = None
            used = len(call.raw) - length
            if call.is_started:
                # The client has seen its beginning; it stays without an end.
                self._between = ""
                return self._give_up(text[used - 1 :])
            return self._give_up("".join(call.raw) + text[used:])
        self.found += call.is_started and not was_started
        if not call.is_done:
            return ""
        self._call = None
        if not call.is_started and not self._send_whole(call):
            return self._give_up("".join(call.raw) + text[used:])
        self._between = ""
        return text[used:]

    def _send_whole(self, call: _JsonCall) -> bool:
        whole = call.whole(needs_arguments=self._needs_arguments)
        if whole is None:
            return False
        self.found += 1
        self._sink.start(whole.name)
        self._sink.arguments(whole.arguments)
        self._sink.end()
        return True

    def _give_up(self, rest: str) -> str:
        self.is_over = True
        between, self._between = self._between, ""
        return (between.lstrip(_WHITESPACE + self._separators) if self.found else between) + rest


def _call_in(value: object, *, needs_arguments: bool) -> ParsedToolCall:
    """Return the call in an object of one of the shapes that models write.

    Raises:
        ValueError: The object is no call.
    """
    if not isinstance(value, Mapping):
        raise ValueError("a call is an object")  # noqa: TRY004 - of the model's text
    function = value.get("function")
    if isinstance(function, Mapping):
        value = function
    arguments = next((value[key] for key in _ARGUMENTS if value.get(key) is not None), None)
    if arguments is None and (needs_arguments or not value.keys() <= set(_KEYS)):
        # Beside a key that is unknown they may be that key's value: a call without them is another.
        raise ValueError("arguments are missing")
    name = value.get("name", function)
    return parsed_call({"name": name, "arguments": arguments})


def _unquoted(raw: str) -> str | None:
    try:
        text = json.loads(f'"{raw}"', strict=False)
    except ValueError:
        return None
    return text if isinstance(text, str) else None
