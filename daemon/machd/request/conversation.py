"""A conversation to continue, whatever dialect it came in.

Chat completions, responses and messages are three spellings of this. What follows from it (the
prompt, the grammar, how the answer is read) is worked out once, in :mod:`machd.reading.conversation`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType

from machd.request.constraint import Constraint


@dataclass(frozen=True, slots=True)
class FunctionTool:
    """A function that the model may ask for.

    Attributes:
        parameters: The JSON schema of its arguments; None where it takes any object.
    """

    name: str
    description: str | None = None
    parameters: Mapping[str, object] | None = None


def template_tool(tool: FunctionTool) -> dict[str, object]:
    """A tool as OpenAI's chat completions write it; templates expect every key."""
    return {
        "type": "function",
        "function": {
            "name": tool.name,
            "description": tool.description or "",
            "parameters": dict(tool.parameters or {"type": "object", "properties": {}}),
        },
    }


def template_call(
    call_id: str, name: str | None, arguments: Mapping[str, object]
) -> dict[str, object]:
    """A call that the model made, as templates read it."""
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


class ToolChoiceMode(StrEnum):
    """Mode of tool calls."""

    NONE = "none"
    """No call; the model is not even shown the tools."""

    AUTO = "auto"
    """The model decides."""

    REQUIRED = "required"
    """At least one call, and no text beside it."""


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Choice of tools.

    Attributes:
        name: With ``REQUIRED``, the one function that is to be called; None for any.
        allows_parallel: Whether one answer may hold several calls.
    """

    mode: ToolChoiceMode = ToolChoiceMode.AUTO
    name: str | None = None
    allows_parallel: bool = True


@dataclass(frozen=True, slots=True)
class Conversation:
    """A checked conversation.

    Attributes:
        messages: In the shape that chat templates read, which is that of OpenAI's chat messages:
            ``role`` and ``content``, a text; in a message with images or videos a list of parts:
            ``{"type": "text", "text": …}`` and, in their places, ``{"type": "image" or "video",
            "source":`` :class:`~machd.request.media.MediaSource` ``}``; ``tool_calls`` of an assistant's message, each
            ``{"id", "type": "function", "function": {"name", "arguments"}}`` with the arguments as
            an object; ``tool_call_id`` and ``name`` of a tool's; ``reasoning_content`` of an
            assistant's that thought.
        messages_param: The request field that they came from, for errors about them.
        tools: In the order in which the client named them; names are unique.
        constraint: What the text of the answer has to look like; not the thoughts before it.
        thinks: Whether the model is to think first; None leaves it to its template.
        thinking_budget_tokens: Tokens after which thoughts are brought to an end.
        template_variables: What else the template is given; from an allow-list.
        max_prompt_tokens: Tokens that the prompt may have; the oldest turns of a longer one are left
            out. None for no such bound, -1 for what the context holds.
        prediction: A text that the answer may repeat: it changes no token, only how fast they come.
        continues_final_message: The answer goes on where the last message, an assistant's, stops.
        is_located: The answer is to tell a place of the prompt in the conversation.
        message_indices: Of each message, the index in the request of the message or item that it begins with; None for one
            that the request has in another field. None as a whole where the messages are those of the request.
    """

    messages: list[dict[str, object]]
    messages_param: str = "messages"
    tools: tuple[FunctionTool, ...] = ()
    tool_choice: ToolChoice = ToolChoice()
    constraint: Constraint | None = None
    thinks: bool | None = None
    thinking_budget_tokens: int | None = None
    template_variables: Mapping[str, object] = field(default_factory=lambda: MappingProxyType({}))
    continues_final_message: bool = False
    is_located: bool = False
    message_indices: Sequence[int | None] | None = field(default=None, compare=False)
    max_prompt_tokens: int | None = None
    prediction: str | None = None
