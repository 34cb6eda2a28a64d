"""How a model writes thoughts and calls: mlx-lm's knowledge of it, as data.

mlx-lm finds the markers and parses what stands between them. Here its answers are taken once for
each tokenizer, its parsers are given one way to fail, and its state machine is kept away from text
that holds no marker.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from machd.engine.backend.mlx_lm_import import import_mlx_lm
from machd.engine.backend.untyped import WrappedTokenizer
from machd.engine.protocol.chat_format import ParsedToolCall, TextSplitter, TextState

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
"""What mlx-lm's parsers look for between the markers, and vocabularies may have as special tokens."""

_Parser = Callable[[str, list[Mapping[str, object]]], object]
_Transitions = Mapping[str, Sequence[tuple[str, str]]]


def _parse_json(text: str, _tools: list[Mapping[str, object]]) -> object:
    return json.loads(text, strict=False)


@dataclass(frozen=True, slots=True)
class MarkedChatFormat:
    """A :class:`machd.engine.protocol.chat_format.ChatFormat` whose states change at markers in the text.

    Attributes:
        structural_markers: What frames plain text and is no part of it.
        transitions: mlx-lm's response format: state to pairs of marker and next state.
        first_state: Where mlx-lm's response format begins; None for plain text.
        parse: mlx-lm's parser of calls.
    """

    tool_format: str | None = None
    tool_markers: tuple[str, str] | None = None
    shows_tools: bool = False
    reasoning_markers: tuple[str, str] | None = None
    has_reasoning_switch: bool = False
    structural_markers: tuple[str, ...] = ()
    transitions: _Transitions = field(default_factory=dict)
    first_state: str | None = None
    parse: _Parser = _parse_json

    @property
    def opening_state(self) -> TextState:
        """Where an answer begins whose prompt opened nothing."""
        return _state(self.first_state or TextState.NORMAL)

    def markers(self, *, tools: bool) -> tuple[str, ...]:
        """Texts by which the answer is read, which may be special tokens."""
        found = [*(self.reasoning_markers or ()), *self.structural_markers]
        found += [marker for edges in self.transitions.values() for marker, _ in edges]
        if tools and self.tool_markers is not None:
            found += [*self.tool_markers, *_INNER_MARKERS.get(self.tool_format or "", ())]
        return tuple(dict.fromkeys(marker for marker in found if marker))

    def splitter(self, *, tools: bool, starts_in: TextState) -> TextSplitter:
        """A fresh one; nothing is imported until a marker may have begun."""
        first = self.first_state if starts_in is TextState.HEADER else None
        return _MarkerSplitter(self, tools=tools, state=first or str(starts_in))

    def parse_tool_calls(
        self, text: str, tools: Sequence[Mapping[str, object]]
    ) -> list[ParsedToolCall]:
        """The calls in what stood between the markers.

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

    def with_json_calls(self) -> MarkedChatFormat:
        """The same model, told by the prompt to write calls as JSON between markers."""
        return replace(
            self,
            tool_format=JSON_TOOLS,
            tool_markers=JSON_TOOL_MARKERS,
            transitions=self._transitions_without_tools(),
            parse=_parse_json,
        )

    def _transitions_without_tools(self) -> _Transitions:
        return {
            state: [edge for edge in edges if edge[1] != TextState.TOOL]
            for state, edges in self.transitions.items()
        }

    def _transitions(self, *, tools: bool) -> dict[str, list[tuple[str, str]]]:
        """What mlx-lm's state machine is made from; calls that nobody looks for are plain text."""
        return {
            state: [
                (marker, TextState.NORMAL if then == TextState.TOOL and not tools else then)
                for marker, then in edges
            ]
            for state, edges in self.transitions.items()
        }


class _MachineFacts:
    """A format as mlx-lm's maker of state machines reads a tokenizer."""

    def __init__(self, chat_format: MarkedChatFormat, *, tools: bool) -> None:
        thoughts = chat_format.reasoning_markers
        self.think_start, self.think_end = thoughts or ("", "")
        self.has_thinking = thoughts is not None
        calls = chat_format.tool_markers if tools else None
        self.tool_call_start, self.tool_call_end = calls or ("", "")
        self.has_tool_calling = calls is not None
        self.structural_markers = chat_format.structural_markers
        self.response_transitions = chat_format._transitions(tools=tools)  # noqa: SLF001 - its own


class _MarkerSplitter:
    """mlx-lm's state machine, which reads a character at a time, behind a look for markers."""

    def __init__(self, chat_format: MarkedChatFormat, *, tools: bool, state: str) -> None:
        self._format = chat_format
        self._looks_for_tools = tools
        self._name = state
        self._first_characters = "".join({marker[0] for marker in chat_format.markers(tools=tools)})
        self._machine: tuple[str, object, object, str] | None = None

    def push(self, text: str) -> list[tuple[TextState, str]]:
        holds_nothing = self._machine is None or not self._machine[3]
        if holds_nothing and not any(one in text for one in self._first_characters):
            return [(_state(self._name), text)]
        from mlx_lm.generate import TextStateMachine  # noqa: PLC0415 - after import_mlx_lm()

        machine = self._start() if self._machine is None else self._machine
        self._machine, stretches = TextStateMachine.split(machine, text)
        self._name = stretches[-1][0]
        return [(_state(name), stretch) for name, stretch in stretches]

    def finish(self) -> list[tuple[TextState, str]]:
        held = "" if self._machine is None else self._machine[3]
        return [(_state(self._name), held)] if held else []

    def _start(self) -> tuple[str, object, object, str]:
        import_mlx_lm()
        from mlx_lm.generate import make_text_state_machine  # noqa: PLC0415 - after import_mlx_lm()

        facts = _MachineFacts(self._format, tools=self._looks_for_tools)
        machine = make_text_state_machine(facts).make_state(self._name)
        assert isinstance(machine, tuple)
        return machine


def _state(name: str) -> TextState:
    """mlx-lm's states that hold text have our names; in all others text means nothing."""
    try:
        return TextState(name)
    except ValueError:
        return TextState.HEADER


def parsed_call(parsed: object) -> ParsedToolCall:
    """A call of what a parser gave: a name, and arguments as an object, its JSON text, or nothing.

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
    # Half a surrogate pair has no UTF-8; escaped, it is JSON again.
    return text if _is_utf8(text) else json.dumps(arguments)


def _is_utf8(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def read_chat_format(
    wrapped: WrappedTokenizer, *, shows_tools: bool, has_reasoning_switch: bool
) -> MarkedChatFormat:
    """What mlx-lm knows of a tokenizer's model.

    Args:
        wrapped: An ``mlx_lm.tokenizer_utils.TokenizerWrapper``.
        shows_tools: As found by rendering.
        has_reasoning_switch: The same.
    """
    parser = wrapped.tool_parser if wrapped.has_tool_calling else None
    return MarkedChatFormat(
        tool_format=None if parser is None else _tool_format(wrapped),
        tool_markers=(
            None if parser is None else (wrapped.tool_call_start, wrapped.tool_call_end or "")
        ),
        shows_tools=shows_tools,
        reasoning_markers=(
            (wrapped.think_start, wrapped.think_end) if wrapped.has_thinking else None
        ),
        has_reasoning_switch=has_reasoning_switch,
        structural_markers=tuple(wrapped.structural_markers),
        transitions=dict(wrapped.response_transitions),
        first_state=wrapped.response_initial_state,
        parse=_parse_json if parser is None else parser,
    )


def _tool_format(wrapped: WrappedTokenizer) -> str:
    """mlx-lm's loader notes it; where another one built the tokenizer, the parser's module tells."""
    named = getattr(wrapped, "init_kwargs", {}).get("tool_parser_type")
    return str(named or wrapped.tool_parser.__module__.rpartition(".")[2])
