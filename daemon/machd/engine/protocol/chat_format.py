"""The format of a model's thoughts and tool calls: markers in its text, and a parser of calls.

This is plain data, but for mlx-lm's parser.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TypeAlias

JSON_TOOLS = "json_tools"
"""mlx-lm's name for calls that are JSON objects between markers."""

JSON_TOOL_MARKERS = ("<tool_call>", "</tool_call>")

_INNER_MARKERS: Mapping[str, tuple[str, ...]] = {
    "function_gemma": ("<escape>",),
    "gemma4": ('<|"|>',),
    "glm47": ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    "json_tools": (),
    "kimi_k2": ("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    "kimi_k3": ("<|open|>", "<|close|>", "<|sep|>"),
    "laguna": ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    "longcat": (
        "<longcat_arg_key>",
        "</longcat_arg_key>",
        "<longcat_arg_value>",
        "</longcat_arg_value>",
    ),
    "minicpm5": ("<param", "</param>"),
    "minimax_m2": ("<invoke", "</invoke>", "<parameter", "</parameter>"),
    "mistral": ("[ARGS]", "[CALL_ID]"),
    "muse_spark": (),
    "pythonic": (),
    "qwen3_coder": ("<function=", "</function>", "<parameter=", "</parameter>"),
}
"""Texts that mlx-lm's parsers read between the markers, and vocabularies may have as special tokens."""

BARE_CALL_MARKERS: Mapping[str, tuple[str, str]] = {
    "kimi_k2": ("<|tool_call_begin|>", "<|tool_call_end|>"),
    "minimax_m2": ("<invoke name=", "</invoke>"),
    "qwen3_coder": ("<function=", "</function>"),
}
"""Texts before and behind one call, by which it is known where a model forgets the markers around it."""

Transitions: TypeAlias = Mapping[str, Sequence[tuple[str, str]]]
"""mlx-lm's name of a state to pairs of a marker and the next state."""


class TextState(StrEnum):
    """The meaning of a stretch of a chat completion's text."""

    NORMAL = "normal"
    REASONING = "reasoning"
    TOOL = "tool"
    HEADER = "header"
    """Between the messages of one answer: such text means nothing."""

    @classmethod
    def named(cls, name: str) -> TextState:
        """Find the state of mlx-lm's name; text in a state that is not listed here means nothing."""
        try:
            return cls(name)
        except ValueError:
            return cls.HEADER


class SystemMessages(StrEnum):
    """Places in a conversation where a chat template shows a system message."""

    ANYWHERE = "anywhere"
    FIRST = "first"
    """In front of all others alone; elsewhere it is refused or left out."""

    NONE = "none"


@dataclass(frozen=True, slots=True)
class ParsedToolCall:
    """One call; ``arguments`` is the JSON text of an object."""

    name: str
    arguments: str


def _parse_json(text: str, _tools: list[Mapping[str, object]]) -> object:
    return json.loads(text, strict=False)


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """The format of a model's thoughts and calls. Any thread may use it.

    Attributes:
        tool_format: mlx-lm's name of the format of calls; None where it knows none.
        tool_markers: Texts before and behind a call, the second may be empty; None where mlx-lm knows
            none.
        shows_tools: Whether the chat template shows tools to the model.
        reasoning_markers: Texts before and behind thoughts; None for a model without thoughts.
        system_messages: Where the template takes system messages.
        takes_user_after_tool: Whether the template takes a user's turn behind the result of a call.
        structural_markers: Texts that frame plain text and are no part of it.
        transitions: States of the text, for models with more of them than thoughts and calls.
        first_state: mlx-lm's state at the beginning of an answer; None for plain text.
        parse: mlx-lm's parser of calls, from text and tools.
    """

    tool_format: str | None = None
    tool_markers: tuple[str, str] | None = None
    shows_tools: bool = False
    reasoning_markers: tuple[str, str] | None = None
    system_messages: SystemMessages = SystemMessages.ANYWHERE
    takes_user_after_tool: bool = True
    structural_markers: tuple[str, ...] = ()
    transitions: Transitions = field(default_factory=dict)
    first_state: str | None = None
    parse: Callable[[str, list[Mapping[str, object]]], object] = _parse_json

    @property
    def opening_state(self) -> TextState:
        """The state in which an answer begins after a prompt that opened nothing."""
        return TextState.named(self.first_state or TextState.NORMAL)

    def edges(self, *, tools: bool) -> dict[str, list[tuple[str, str]]]:
        """Return the markers that end each state, with the next state, as mlx-lm's server joins them; of calls if ``tools``."""
        edges = [*self._thought_edges(), *(self._call_edges() if tools else ())]
        edges += [(TextState.NORMAL, one, TextState.NORMAL) for one in self.structural_markers]
        edges += [
            (state, marker, TextState.NORMAL if then == TextState.TOOL and not tools else then)
            for state, transitions in self.transitions.items()
            for marker, then in transitions
        ]
        found: dict[str, list[tuple[str, str]]] = {}
        for state, marker, then in edges:
            found.setdefault(state, []).append((marker, then))
        return found

    def _thought_edges(self) -> list[tuple[str, str, str]]:
        if self.reasoning_markers is None:
            return []
        start, end = self.reasoning_markers
        return [
            (TextState.NORMAL, start, TextState.REASONING),
            (TextState.REASONING, end, TextState.NORMAL),
        ]

    def _call_edges(self) -> list[tuple[str, str, str]]:
        if self.tool_markers is None:
            return []
        start, _ = self.tool_markers
        edges = [] if self.reasoning_markers is None else [(TextState.REASONING, start)]
        targets = {then for edges in self.transitions.values() for _, then in edges}
        if TextState.TOOL not in targets:
            bare = BARE_CALL_MARKERS.get(self.tool_format or "", ())[:1]
            edges += [(TextState.NORMAL, marker) for marker in (start, *bare)]
        return [(state, marker, TextState.TOOL) for state, marker in edges]

    def markers(self, *, tools: bool) -> tuple[str, ...]:
        """List the texts by which an answer is read, of calls if ``tools``; some are special tokens."""
        found = [*(self.reasoning_markers or ()), *self.structural_markers]
        found += [marker for edges in self.transitions.values() for marker, _ in edges]
        if tools and self.tool_markers is not None:
            found += [*self.tool_markers, *_INNER_MARKERS.get(self.tool_format or "", ())]
        return tuple(dict.fromkeys(marker for marker in found if marker))

    def parse_tool_calls(
        self, text: str, tools: Sequence[Mapping[str, object]]
    ) -> list[ParsedToolCall]:
        """Parse the text between the markers of calls; some formats write values without types, which ``tools`` have.

        Raises:
            ValueError: It is no call.
        """
        try:
            parsed = self.parse(text, list(tools))
        except Exception as error:  # a parser of a model's text fails in every way there is
            raise ValueError("it is no call") from error
        calls = [parsed_call(one) for one in (parsed if isinstance(parsed, list) else [parsed])]
        if not calls:
            raise ValueError("there is no call")
        return calls

    def with_json_calls(self) -> ChatFormat:
        """Return the format of a model that the prompt tells to write calls as JSON in markers."""
        without_tools = {
            state: [edge for edge in edges if edge[1] != TextState.TOOL]
            for state, edges in self.transitions.items()
        }
        return replace(
            self,
            tool_format=JSON_TOOLS,
            tool_markers=JSON_TOOL_MARKERS,
            transitions=without_tools,
            parse=_parse_json,
        )


def parsed_call(parsed: object) -> ParsedToolCall:
    """Check a parser's call: a name, and arguments as an object, its JSON text, or nothing.

    Raises:
        ValueError: It is no call.
    """
    if not isinstance(parsed, Mapping):
        raise ValueError("a call is an object")  # noqa: TRY004 - a parser's result, not a mistake
    name, arguments = parsed.get("name"), parsed.get("arguments")
    if not isinstance(name, str) or not name:
        raise ValueError("a call has a name")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments, strict=False)
        except RecursionError as error:
            raise ValueError("the arguments are nested too deep") from error
    if not isinstance(arguments, Mapping | None):
        raise ValueError("arguments are an object")  # noqa: TRY004 - the same
    return ParsedToolCall(name, _json_text({} if arguments is None else arguments))


def _json_text(arguments: Mapping[str, object]) -> str:
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except (TypeError, RecursionError) as error:
        raise ValueError("the arguments are not JSON") from error
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return json.dumps(arguments)  # half a surrogate pair has no UTF-8, and is escaped
    return text
