"""Calls with arguments in tags, each value between an opening and a closing tag.

The tags are parsed here, strictly: any other text between them makes the whole no call. mlx-lm's parsers
search for known tags and drop the rest, so they get one well-formed call at a time, to convert its values to
the types of the tool's schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from machd.engine.protocol.chat_format import ParsedToolCall

_MASKS = range(0xE000, 0xF900)
"""Private characters: one that a text does not hold stands for ``<`` in values."""

_CDATA = re.compile(r"\s*<!\[CDATA\[(?P<text>.*?)\]\]>\s*", re.DOTALL)
_OPEN_CDATA = re.compile(r"\s*<!\[CDATA\[")


class OpenValueError(ValueError):
    """The text ends inside a value, in which a closing marker means nothing."""


@dataclass(frozen=True, slots=True)
class CallTags:
    """The tags of a format.

    Attributes:
        function: Opens a call; its group is the name.
        function_end: Closes it; empty where the section's closing marker does.
        parameter: Opens a value; groups ``key`` and, where ``parameter_end`` has it, ``tag``.
        parameter_end: Closes it.
    """

    function: re.Pattern[str]
    function_end: str
    parameter: re.Pattern[str]
    parameter_end: str


def _argument_tags(prefix: str) -> CallTags:
    key, value = f"{prefix}arg_key>", f"{prefix}arg_value>"
    return CallTags(
        function=re.compile(r"(?P<name>[^\s<]+)"),
        function_end="",
        parameter=re.compile(rf"<{key}(?P<key>[^<]*)</{key}(?:\\n|\s)*<{value}"),
        parameter_end=f"</{value}",
    )


_QUOTED = r"""(?P<{0}>"[^"]*"|'[^']*'|[^\s"'<>]+)"""

CALL_TAGS: Mapping[str, CallTags] = {
    "qwen3_coder": CallTags(
        function=re.compile(r"<function=\s*(?P<name>[^\s<>]+)>"),
        function_end="</function>",
        parameter=re.compile(r"<parameter=\s*(?P<key>[^\s<>]+)>"),
        parameter_end="</parameter>",
    ),
    "minimax_m2": CallTags(
        function=re.compile(rf"<invoke name={_QUOTED.format('name')}\s*>"),
        function_end="</invoke>",
        parameter=re.compile(rf"<parameter name={_QUOTED.format('key')}\s*>"),
        parameter_end="</parameter>",
    ),
    "minicpm5": CallTags(
        function=re.compile(rf"(?:<function name=)?{_QUOTED.format('name')}\s*>"),
        function_end="",
        parameter=re.compile(rf"<param\s+name\s*=\s*{_QUOTED.format('key')}\s*>"),
        parameter_end="</param>",
    ),
    "muse_spark": CallTags(
        function=re.compile(r'<atem:invoke\b[^<>]*?\bname="(?P<name>[^"<>]+)">'),
        function_end="</atem:invoke>",
        parameter=re.compile(r'<atem:parameter\b[^<>]*?\bname="(?P<key>[^"<>]+)"[^<>]*>'),
        parameter_end="</atem:parameter>",
    ),
    "kimi_k3": CallTags(
        function=re.compile(
            r'<\|open\|>call(?:(?!<\|sep\|>)[^<])*?\btool="(?P<name>[^"<]+)"[^<]*<\|sep\|>'
        ),
        function_end="<|close|>call<|sep|>",
        parameter=re.compile(
            r'<\|open\|>(?P<tag>argument|json)\b(?:[^<]*?\bkey="(?P<key>[^"<]*)")?[^<]*<\|sep\|>'
        ),
        parameter_end="<|close|>{tag}<|sep|>",
    ),
    "glm47": _argument_tags(""),
    "laguna": _argument_tags(""),
    "longcat": _argument_tags("longcat_"),
}
"""By mlx-lm's name of the format."""


@dataclass(frozen=True, slots=True)
class TaggedValue:
    """One argument as it was written, between its tags.

    Attributes:
        key: None where the value is all arguments.
    """

    key: str | None
    opening: str
    text: str
    closing: str


@dataclass(frozen=True, slots=True)
class TaggedCall:
    """One call as it was written, between its tags."""

    name: str
    opening: str
    values: tuple[TaggedValue, ...]
    closing: str

    def parsed(self, parse: Callable[[str], list[ParsedToolCall]]) -> ParsedToolCall:
        """Return the call with its values as the tool's schema wants them; ``parse`` is mlx-lm's, for one call.

        Raises:
            ValueError: The parser found another call than the tags contain.
        """
        if not self.values:
            return ParsedToolCall(self.name, "{}")
        texts = "".join(value.text for value in self.values).lower()
        # JSON may also escape it by its number.
        mask = next(
            chr(one) for one in _MASKS if chr(one) not in texts and f"\\u{one:04x}" not in texts
        )
        written = "".join(
            f"{value.opening}{_masked(value.text, mask)}{value.closing}" for value in self.values
        )
        calls = parse(f"{self.opening}{written}{self.closing}")
        keys = [value.key for value in self.values]
        arguments = calls[0].arguments
        if (
            len(calls) != 1
            or calls[0].name != self.name
            or (None not in keys and set(json.loads(arguments)) != set(keys))
        ):
            raise ValueError("the parser found another call")
        escaped = json.dumps(mask)[1:-1]
        return ParsedToolCall(self.name, arguments.replace(mask, "<").replace(escaped, "<"))


def read_tagged_calls(
    tags: CallTags,
    text: str,
    markers: tuple[str, ...],
    *,
    is_closed: bool = True,
    is_lenient: bool = False,
    keys_of: Callable[[str], Collection[str] | None] = lambda _: None,
) -> list[TaggedCall]:
    """Read the calls that a text is made of.

    A value whose closing tag is missing ends where the next one opens, or where its function ends
    and nothing but functions follows. A value may spell such an opening itself: it is one if the function has an argument of that
    name that is not given yet.

    Args:
        tags: The format's tags.
        text: The text between the section's markers.
        markers: The section's markers: a value that has them and lacks its closing tag has no end.
        is_closed: Whether the closing marker follows the text; it ends a function as well.
        is_lenient: Whether the text is complete, so that it also ends a value without a closing tag.
        keys_of: Returns a function's arguments; None where they are not known.

    Raises:
        OpenValueError: The text ends inside a value.
        ValueError: The text has anything but calls.
    """
    calls: list[TaggedCall] = []
    position = _skipped(text, 0)
    while position < len(text):
        opened = tags.function.match(text, position)
        if opened is None:
            raise ValueError("a function has to begin here")
        name = _unquoted(opened["name"])
        values, position, has_ended = _read_values(
            tags, text, opened.end(), markers, keys_of(name), is_lenient=is_lenient
        )
        if not (is_closed or has_ended):
            raise ValueError("the function's end is missing")
        calls.append(TaggedCall(name, opened[0], tuple(values), tags.function_end))
        position = _skipped(text, position)
    return calls


def _read_values(
    tags: CallTags,
    text: str,
    position: int,
    markers: tuple[str, ...],
    keys: Collection[str] | None,
    *,
    is_lenient: bool,
) -> tuple[list[TaggedValue], int, bool]:
    """Return a function's values, where the text behind it begins, and whether its closing tag was read."""
    values: list[TaggedValue] = []
    while True:
        position = _skipped(text, position)
        if tags.function_end and text.startswith(tags.function_end, position):
            return values, position + len(tags.function_end), True
        opened = tags.parameter.match(text, position)
        if opened is None:
            ends_here = position == len(text) or (
                tags.function_end and tags.function.match(text, position)
            )
            if not ends_here:
                raise ValueError("a value or the function's end has to stand here")
            return values, position, False
        key = None if opened["key"] is None else _unquoted(opened["key"]).strip()
        given = {key, *(value.key for value in values)}
        left = None if keys is None else {one for one in keys if one not in given}
        end, position = _value_end(tags, text, opened, markers, left, is_lenient=is_lenient)
        values.append(TaggedValue(key, opened[0], text[opened.end() : end], _closing(tags, opened)))


def _closing(tags: CallTags, opened: re.Match[str]) -> str:
    return tags.parameter_end.replace("{tag}", opened.groupdict().get("tag") or "")


def _value_end(
    tags: CallTags,
    text: str,
    opened: re.Match[str],
    markers: tuple[str, ...],
    keys: Collection[str] | None,
    *,
    is_lenient: bool,
) -> tuple[int, int]:
    """Return where a value ends, and where the text behind its closing tag begins."""
    start, closing = opened.end(), _closing(tags, opened)
    whole = _CDATA.match(text, start)
    if whole is None and _OPEN_CDATA.match(text, start):
        raise OpenValueError
    end = text.find(closing, whole.end() if whole is not None else start)
    missing_at = None if whole is not None else _missing_end(tags, text, start, end, keys)
    if missing_at is None and end >= 0:
        return end, end + len(closing)
    if missing_at is None and is_lenient:
        missing_at = len(text)
    if missing_at is None or any(marker in text[start:missing_at] for marker in markers):
        raise OpenValueError
    return missing_at, missing_at


def _missing_end(
    tags: CallTags, text: str, start: int, end: int, keys: Collection[str] | None
) -> int | None:
    """Return where a value ends whose closing tag was left out; None if it was not."""
    until = len(text) if end < 0 else end
    following = next(
        (
            one
            for one in tags.parameter.finditer(text, start, until)
            # Where functions have no closing tag it may open a value of the next one.
            if keys is None
            or not tags.function_end
            or (one["key"] or "").strip("'\" \t\r\n") in keys
        ),
        None,
    )
    if tags.function_end:
        closed = text.find(tags.function_end, start, until)
        if closed >= 0 and (following is None or closed < following.start()):
            behind = _skipped(text, closed + len(tags.function_end))
            if behind == len(text) or tags.function.match(text, behind):
                return closed
    return None if following is None else following.start()


def _masked(text: str, mask: str) -> str:
    whole = _CDATA.fullmatch(text)
    if whole is None:
        return text.replace("<", mask)
    start, end = whole.span("text")
    return text[:start] + text[start:end].replace("<", mask) + text[end:]


def _skipped(text: str, position: int) -> int:
    while position < len(text) and text[position] in " \t\r\n":
        position += 1
    return position


def _unquoted(name: str) -> str:
    return (
        name[1:-1] if name[:1] in ("'", '"') and name[:1] == name[-1:] and len(name) > 1 else name
    )
