"""Tools and the answer's schema as ``/v1/responses`` spells them: flat, and of many kinds.

Functions are the one kind that machd serves. The others run on OpenAI's machines, so a request
that brings one is refused, by the kind's name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal, TypeAlias

from msgspec import UNSET, Meta, Struct

from machd.api.bounds import MAX_TOOLS, Description, ToolName
from machd.api.conversation import FunctionTool, ToolChoice, ToolChoiceMode
from machd.api.raw_json import OptionalSchema, Schema
from machd.api.tools import check_tool_choice, check_unique_names, parameters_of
from machd.errors import InvalidRequestError, UnsupportedParameterError

__all__ = [
    "ResponsesTool",
    "ResponsesToolChoice",
    "ResponsesToolList",
    "SchemaTextFormat",
    "responses_tool_choice",
    "responses_tools",
]

_ToolKind: TypeAlias = Literal[
    "function",
    "apply_patch",
    "code_interpreter",
    "computer",
    "computer_use_preview",
    "custom",
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


class SchemaTextFormat(Struct, frozen=True, kw_only=True, tag="json_schema", tag_field="type"):
    """JSON that follows a schema.

    Attributes:
        description: Accepted; the model is not shown it.
        strict: Accepted; the schema is followed to the letter whatever it says.
    """

    name: ToolName
    schema: Schema
    description: Description | None = None
    strict: bool | None = None


class ResponsesTool(Struct, frozen=True, kw_only=True):
    """A tool; every kind but ``function`` is refused.

    Attributes:
        name: Of a function.
        parameters: JSON schema of its arguments, an object; any object will do without one.
        strict: Whether the arguments have to follow the schema to the letter.
    """

    type: _ToolKind
    name: ToolName | None = None
    description: Description | None = None
    parameters: OptionalSchema = UNSET
    strict: bool | None = None


class ToolReference(Struct, frozen=True, kw_only=True):
    """One of the request's tools, by its name."""

    type: _ToolKind
    name: ToolName | None = None


class ToolChoiceObject(Struct, frozen=True, kw_only=True):
    """A choice that names tools; every kind but the first two is refused.

    Attributes:
        name: With ``function``, the one that is to be called.
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


def responses_tools(tools: Sequence[ResponsesTool] | None) -> tuple[FunctionTool, ...]:
    """The tools of a request, free of this dialect.

    Raises:
        UnsupportedParameterError: One is no function.
        InvalidRequestError: One has no name, two have the same, or parameters are no JSON object.
    """
    given = tools or ()
    names = [
        _function_name(tool.type, tool.name, f"tools[{index}]") for index, tool in enumerate(given)
    ]
    check_unique_names(names, place="tools[{index}].name")
    return tuple(
        FunctionTool(
            name=name,
            description=tool.description,
            parameters=parameters_of(tool.parameters, param=f"tools[{index}].parameters"),
            strict=bool(tool.strict),
        )
        for index, (name, tool) in enumerate(zip(names, given, strict=True))
    )


def responses_tool_choice(
    choice: ResponsesToolChoice | None,
    tools: tuple[FunctionTool, ...],
    *,
    parallel_tool_calls: bool | None,
) -> tuple[ToolChoice, tuple[FunctionTool, ...]]:
    """What is asked about calls, and the tools that may be called.

    Raises:
        UnsupportedParameterError: It names a tool that is no function.
        InvalidRequestError: A call is asked for without tools, or of a tool that is not there.
    """
    allows_parallel = parallel_tool_calls is not False
    if choice is None or isinstance(choice, str):
        asked = ToolChoice(ToolChoiceMode(choice or "auto"), allows_parallel=allows_parallel)
    elif choice.type == "allowed_tools":
        tools = _allowed(choice, tools)
        asked = ToolChoice(ToolChoiceMode(choice.mode or "auto"), allows_parallel=allows_parallel)
    else:
        name = _function_name(choice.type, choice.name, "tool_choice")
        asked = ToolChoice(ToolChoiceMode.REQUIRED, name, allows_parallel)
    check_tool_choice(asked, tools, param="tool_choice")
    return asked, tools


def _allowed(choice: ToolChoiceObject, tools: tuple[FunctionTool, ...]) -> tuple[FunctionTool, ...]:
    names = {
        _function_name(one.type, one.name, f"tool_choice.tools[{index}]")
        for index, one in enumerate(choice.tools or ())
    }
    if not names or not names <= {tool.name for tool in tools}:
        raise InvalidRequestError(
            "tool_choice.tools: has to name one or more functions of tools", param="tool_choice"
        )
    return tuple(tool for tool in tools if tool.name in names)


def _function_name(kind: str, name: str | None, place: str) -> str:
    if kind != "function":
        param = f"{place}.type"
        raise UnsupportedParameterError(
            f'{param}: tools of type "{kind}" are not supported; send "function"', param=param
        )
    if name is None:
        param = f"{place}.name"
        raise InvalidRequestError(f"{param}: required, but missing", param=param)
    return name
