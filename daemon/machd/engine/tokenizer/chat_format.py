"""mlx-lm's knowledge of how a model writes thoughts and calls, taken once for each tokenizer.

mlx-lm's state machine reads a character at a time, so it is not run on text without a marker.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from machd.engine.backend.mlx_lm_import import import_mlx_lm
from machd.engine.backend.untyped import WrappedTokenizer
from machd.engine.protocol.chat_format import ChatFormat, TextSplitter, TextState


@dataclass(frozen=True, slots=True)
class MarkedChatFormat(ChatFormat):
    """A chat format that mlx-lm's state machine splits."""

    def splitter(self, *, tools: bool, starts_in: TextState) -> TextSplitter:
        """Make the splitter of one completion; mlx-lm is imported where a marker may begin."""
        first = self.first_state if starts_in is TextState.HEADER else None
        return _MarkerSplitter(self, tools=tools, state=first or str(starts_in))


class _MachineFacts:
    """A format with a tokenizer's attributes, which mlx-lm makes its state machine of."""

    def __init__(self, chat_format: ChatFormat, *, tools: bool) -> None:
        thoughts = chat_format.reasoning_markers
        self.think_start, self.think_end = thoughts or ("", "")
        self.has_thinking = thoughts is not None
        calls = chat_format.tool_markers if tools else None
        self.tool_call_start, self.tool_call_end = calls or ("", "")
        self.has_tool_calling = calls is not None
        self.structural_markers = chat_format.structural_markers
        # Calls are plain text where no tools are looked for.
        self.response_transitions = {
            state: [
                (marker, TextState.NORMAL if then == TextState.TOOL and not tools else then)
                for marker, then in edges
            ]
            for state, edges in chat_format.transitions.items()
        }


class _MarkerSplitter:
    """mlx-lm's state machine, run from the first character that may begin a marker."""

    def __init__(self, chat_format: ChatFormat, *, tools: bool, state: str) -> None:
        self._format = chat_format
        self._looks_for_tools = tools
        self._name = state
        self._first_characters = "".join({marker[0] for marker in chat_format.markers(tools=tools)})
        self._machine: tuple[str, object, object, str] | None = None

    def push(self, text: str) -> list[tuple[TextState, str]]:
        holds_nothing = self._machine is None or not self._machine[3]
        if holds_nothing and not any(one in text for one in self._first_characters):
            return [(TextState.named(self._name), text)]
        from mlx_lm.generate import TextStateMachine  # noqa: PLC0415 - after import_mlx_lm()

        machine = self._start() if self._machine is None else self._machine
        self._machine, stretches = TextStateMachine.split(machine, text)
        self._name = stretches[-1][0]
        return [(TextState.named(name), stretch) for name, stretch in stretches]

    def finish(self) -> list[tuple[TextState, str]]:
        held = "" if self._machine is None else self._machine[3]
        return [(TextState.named(self._name), held)] if held else []

    def _start(self) -> tuple[str, object, object, str]:
        import_mlx_lm()
        from mlx_lm.generate import make_text_state_machine  # noqa: PLC0415 - after import_mlx_lm()

        facts = _MachineFacts(self._format, tools=self._looks_for_tools)
        machine = make_text_state_machine(facts).make_state(self._name)
        assert isinstance(machine, tuple)
        return machine


def read_chat_format(
    wrapped: WrappedTokenizer, *, shows_tools: bool, has_reasoning_switch: bool
) -> MarkedChatFormat:
    """Take from a tokenizer what mlx-lm has inferred; the flags were found by rendering."""
    known = MarkedChatFormat(
        shows_tools=shows_tools,
        reasoning_markers=(
            (wrapped.think_start, wrapped.think_end) if wrapped.has_thinking else None
        ),
        has_reasoning_switch=has_reasoning_switch,
        structural_markers=tuple(wrapped.structural_markers),
        transitions=dict(wrapped.response_transitions),
        first_state=wrapped.response_initial_state,
    )
    parser = wrapped.tool_parser if wrapped.has_tool_calling else None
    if parser is None:
        return known
    # mlx-lm's loader notes the format; of another loader's tokenizer the parser's module tells it.
    named = getattr(wrapped, "init_kwargs", {}).get("tool_parser_type")
    return replace(
        known,
        tool_format=str(named or parser.__module__.rpartition(".")[2]),
        tool_markers=(wrapped.tool_call_start, wrapped.tool_call_end or ""),
        parse=parser,
    )
