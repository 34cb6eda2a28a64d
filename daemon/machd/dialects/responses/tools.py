"""Tools and the answer's schema as ``/v1/responses`` spells them: flat, and of many kinds.

Functions are served, and custom tools, whose one argument is any text. The other kinds run on
OpenAI's machines or belong to OpenAI's models. Agents bring them with every request, so they are
left out, as if the model had chosen not to call them; a choice that leaves nothing else is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import UNSET, Meta, Struct

from machd.dialects.wire.bounds import MAX_TOOLS, Description, GrammarText, Label, ToolName
from machd.dialects.wire.raw_json import Allowance, OptionalSchema, Schema
from machd.dialects.wire.tools import (
    check_tool_choice,
    check_unique_names,
    parameters_of,
    schemas_allowance,
)
from machd.errors import InvalidRequestError, UnsupportedParameterError
from machd.request.conversation import FunctionTool, ToolChoice, ToolChoiceMode

CUSTOM_INPUT = "input"
"""The one argument of a custom tool, as the model sees it."""

_ToolKind: TypeAlias = Literal[
    "function",
    "custom",
    "apply_patch",
    "code_interpreter",
    "computer",
    "computer_use",
    "computer_use_preview",
    "file_search",
    "image_generation",
    "local_shell",
    "mcp",
    "namespace",
    "programmatic_tool_calling",
    "shell",
    "tool_search",
    "web_search",
    "web_search_2025_08_26",
    "web_search_preview",
    "web_search_preview_2025_03_11",
]
_SERVED = ("function", "custom")


class SchemaTextFormat(Struct, frozen=True, kw_only=True, tag="json_schema", tag_field="type"):
    """JSON that follows a schema.

    Attributes:
        name: Accepted; the model is not shown it.
        description: The same.
        strict: Accepted; the schema is followed to the letter whatever it says.
    """

    name: Label | None = None
    schema: Schema
    description: Description | None = None
    strict: bool | None = None


class AnyInput(Struct, frozen=True, tag="text", tag_field="type"):
    """A custom tool's input is any text."""


class GrammarInput(Struct, frozen=True, kw_only=True, tag="grammar", tag_field="type"):
    """A custom tool's input follows a grammar. The model is shown it, and not held to it."""

    syntax: Literal["lark", "regex"]
    definition: GrammarText


CustomInputFormat: TypeAlias = AnyInput | GrammarInput
"""What a custom tool takes."""


class ResponsesTool(Struct, frozen=True, kw_only=True):
    """A tool; every kind but ``function`` and ``custom`` is left out.

    Attributes:
        name: Of a function or a custom tool.
        parameters: JSON schema of a function's arguments, an object; any object will do without.
        strict: Accepted; where a grammar holds, it follows the schema whatever this says.
        format: What a custom tool takes.
    """

    type: _ToolKind
    name: ToolName | None = None
    description: Description | None = None
    parameters: OptionalSchema = UNSET
    strict: bool | None = None
    format: CustomInputFormat | None = None

    @property
    def is_served(self) -> bool:
        """True if the model is shown it."""
        return self.type in _SERVED


class ToolReference(Struct, frozen=True, kw_only=True):
    """One of the request's tools, by its name."""

    type: _ToolKind
    name: ToolName | None = None

    @property
    def is_served(self) -> bool:
        """True if it is of a kind that the model is shown."""
        return self.type in _SERVED


class ToolChoiceObject(Struct, frozen=True, kw_only=True):
    """A choice that names tools; of a kind that is left out, it is refused.

    Attributes:
        name: With ``function`` or ``custom``, the one that is to be called.
        mode: With ``allowed_tools``, whether one of them has to be called.
        tools: With ``allowed_tools``, those that may be called.
    """

    type: Literal["allowed_tools"] | _ToolKind
    name: ToolName | None = None
    mode: Literal["auto", "required"] | None = None
    tools: Annotated[list[ToolReference], Meta(max_length=MAX_TOOLS)] | None = None


ResponsesToolList: TypeAlias = Annotated[list[ResponsesTool], Meta(max_length=MAX_TOOLS)]
"""The tools of a request; their names are unique."""

ResponsesToolChoice: TypeAlias = Literal["none", "auto", "required"] | ToolChoiceObject
"""Whether tools are called, and which."""


class _CustomArguments(Struct):
    input: str


def responses_tools(tools: Sequence[ResponsesTool] | None) -> tuple[FunctionTool, ...]:
    """The tools of a request that are served, free of this dialect.

    Raises:
        InvalidRequestError: One has no name, two have the same, or parameters are no JSON object.
    """
    allowance = schemas_allowance()
    served = {f"tools[{index}]": tool for index, tool in enumerate(tools or ()) if tool.is_served}
    functions = {place: _function(tool, allowance, place) for place, tool in served.items()}
    check_unique_names((f"{place}.name", one.name) for place, one in functions.items())
    return tuple(functions.values())


def left_out_kinds(tools: Sequence[ResponsesTool] | None) -> list[str]:
    """The kinds of tools that are not served, each once."""
    return sorted({tool.type for tool in tools or () if not tool.is_served})


def responses_tool_choice(
    choice: ResponsesToolChoice | None,
    tools: tuple[FunctionTool, ...],
    *,
    parallel_tool_calls: bool | None,
    left_out: Sequence[str] = (),
) -> tuple[ToolChoice, tuple[FunctionTool, ...]]:
    """Return the choice of tools, and the tools that may be called.

    ``left_out`` are kinds of tools that the request brought and that are not served.

    Raises:
        UnsupportedParameterError: It can only be met by a tool that is not served.
        InvalidRequestError: A call is asked for without tools, or of a tool that is not there.
    """
    allows_parallel = parallel_tool_calls is not False
    if choice is None or isinstance(choice, str):
        asked = ToolChoice(ToolChoiceMode(choice or "auto"), allows_parallel=allows_parallel)
    elif choice.type == "allowed_tools":
        tools = _allowed(choice, tools)
        asked = ToolChoice(ToolChoiceMode(choice.mode or "auto"), allows_parallel=allows_parallel)
    else:
        name = _served_name(choice.type, choice.name, "tool_choice")
        asked = ToolChoice(ToolChoiceMode.REQUIRED, name, allows_parallel)
    if asked.mode is ToolChoiceMode.REQUIRED and not tools and left_out:
        raise _not_served(left_out[0], "tool_choice")
    check_tool_choice(asked, tools, param="tool_choice")
    return asked, tools


def custom_input(arguments: str) -> str:
    """A custom tool's input out of the arguments that the model wrote.

    Arguments that are not as they should be, or cut short, are given as they are: what the client
    makes of them it can tell the model.
    """
    try:
        return msgspec.json.decode(arguments, type=_CustomArguments).input
    except (msgspec.DecodeError, UnicodeEncodeError):
        return arguments


def _allowed(choice: ToolChoiceObject, tools: tuple[FunctionTool, ...]) -> tuple[FunctionTool, ...]:
    named = list(enumerate(choice.tools or ()))
    # Those that are left out do no harm, as long as there are others.
    served = [(index, one) for index, one in named if one.is_served] or named
    names = {
        _served_name(one.type, one.name, f"tool_choice.tools[{index}]") for index, one in served
    }
    if not names or not names <= {tool.name for tool in tools}:
        raise InvalidRequestError(
            "tool_choice.tools: has to name one or more functions of tools", param="tool_choice"
        )
    return tuple(tool for tool in tools if tool.name in names)


def _function(tool: ResponsesTool, allowance: Allowance, place: str) -> FunctionTool:
    name = _served_name(tool.type, tool.name, place)
    if tool.type == "custom":
        return FunctionTool(name, _custom_description(tool), _CUSTOM_PARAMETERS)
    return FunctionTool(
        name=name,
        description=tool.description,
        parameters=parameters_of(tool.parameters, param=f"{place}.parameters", allowance=allowance),
    )


_CUSTOM_PARAMETERS: dict[str, object] = {
    "type": "object",
    "properties": {CUSTOM_INPUT: {"type": "string"}},
    "required": [CUSTOM_INPUT],
    "additionalProperties": False,
}


def _custom_description(tool: ResponsesTool) -> str:
    words = [tool.description] if tool.description else []
    words.append(f'The whole input is one text, the value of "{CUSTOM_INPUT}".')
    if isinstance(tool.format, GrammarInput):
        words.append(f"It follows this {tool.format.syntax} grammar:\n{tool.format.definition}")
    return "\n\n".join(words)


def _served_name(kind: str, name: str | None, place: str) -> str:
    if kind not in _SERVED:
        raise _not_served(kind, f"{place}.type")
    if name is None:
        raise InvalidRequestError.at(f"{place}.name", "required, but missing")
    return name


def _not_served(kind: str, param: str) -> UnsupportedParameterError:
    return UnsupportedParameterError.at(
        param,
        f'tools of type "{kind}" are not supported, so none can be called; name one of '
        'type "function" or "custom"',
    )
