"""What others know of how a model writes thoughts and calls: plain data and two seams."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol


class TextState(StrEnum):
    """What a stretch of a chat completion's text is."""

    NORMAL = "normal"
    REASONING = "reasoning"
    TOOL = "tool"
    HEADER = "header"
    """Between the messages of one answer: such text means nothing."""


class TextSplitter(Protocol):
    """Tells a completion's thoughts, calls and plain text apart while it comes."""

    def push(self, text: str) -> list[tuple[TextState, str]]:
        """The stretches that became certain, markers left out.

        Every change of state shows: a state that begins and ends without text gives an empty
        stretch. The last stretch is of the state that the text is in now.
        """
        ...

    def finish(self) -> list[tuple[TextState, str]]:
        """What was held back because it could have been the beginning of a marker."""
        ...


@dataclass(frozen=True, slots=True)
class ParsedToolCall:
    """One call as the model wrote it.

    Attributes:
        arguments: JSON text of an object.
    """

    name: str
    arguments: str


class ChatFormat(Protocol):
    """How the model writes thoughts and calls. Immutable; any thread may use it."""

    @property
    def tool_format(self) -> str | None:
        """mlx-lm's name for how calls are written; None where it knows none."""
        ...

    @property
    def tool_markers(self) -> tuple[str, str] | None:
        """What stands before a call and after it (may be empty); None where nothing does."""
        ...

    @property
    def shows_tools(self) -> bool:
        """Whether the chat template shows tools to the model."""
        ...

    @property
    def reasoning_markers(self) -> tuple[str, str] | None:
        """What stands around thoughts; None for a model that has none."""
        ...

    @property
    def has_reasoning_switch(self) -> bool:
        """Whether the template lets thinking be switched on and off."""
        ...

    @property
    def opening_state(self) -> TextState:
        """The state in which an answer begins whose prompt opened nothing."""
        ...

    def markers(self, *, tools: bool) -> tuple[str, ...]:
        """Texts by which an answer is read; they may be special tokens.

        Args:
            tools: Whether calls are looked for.
        """
        ...

    def with_json_calls(self) -> ChatFormat:
        """The same model, told by the prompt to write calls as JSON in ``<tool_call>`` markers."""
        ...

    def splitter(self, *, tools: bool, starts_in: TextState) -> TextSplitter:
        """A fresh one for one completion.

        Args:
            tools: Whether calls are looked for.
            starts_in: The state in which the completion begins.
        """
        ...

    def parse_tool_calls(
        self, text: str, tools: Sequence[Mapping[str, object]]
    ) -> list[ParsedToolCall]:
        """The calls in what stood between the markers.

        Args:
            text: Without the markers.
            tools: As the template was given them, for formats that write values without types.

        Raises:
            ValueError: It is no call.
        """
        ...
