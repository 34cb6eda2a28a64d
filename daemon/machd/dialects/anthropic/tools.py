"""Tools in Anthropic's dialect."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, TypeAlias

from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from machd.dialects.wire.bounds import MAX_TOOLS, Description, Label, ToolName
from machd.dialects.wire.other_servers import FalseOnly
from machd.dialects.wire.raw_json import Allowance, OptionalSchema, is_given
from machd.dialects.wire.refusal import Ignored, only, refuse_unsupported
from machd.dialects.wire.tools import (
    check_tool_choice,
    check_unique_names,
    parameters_of,
    schemas_allowance,
)
from machd.errors import InvalidRequestError, UnsupportedParameterError
from machd.request.conversation import FunctionTool, ToolChoice, ToolChoiceMode

_CUSTOM = "custom"

_SERVER_TOOLS = (
    "advisor",
    "bash",
    "code_execution",
    "computer",
    "mcp_toolset",
    "memory",
    "text_editor",
    "tool_search_tool",
    "web_fetch",
    "web_search",
)
"""Kinds that Anthropic defines or runs itself; a type is one of these and a date."""

_DirectOnly: TypeAlias = Annotated[Raw | UnsetType, only(["direct"])]


class AnthropicTool(Struct, frozen=True, kw_only=True):
    """A tool that the client runs.

    Attributes:
        type: ``custom`` unless left out. Tools that Anthropic's servers run are refused.
        input_schema: JSON schema of the call's input.
        strict: Accepted; where a grammar holds, it follows the schema whatever this says.
    """

    name: ToolName
    type: Label | None = None
    description: Description | None = None
    input_schema: OptionalSchema = UNSET
    strict: bool | None = None
    cache_control: Ignored = UNSET
    eager_input_streaming: Ignored = UNSET
    input_examples: Ignored = UNSET
    defer_loading: FalseOnly = UNSET
    allowed_callers: _DirectOnly = UNSET


AnthropicToolList: TypeAlias = Annotated[list[AnthropicTool], Meta(max_length=MAX_TOOLS)]
"""The tools of a request; their names are unique."""


class AutoToolChoice(Struct, frozen=True, kw_only=True, tag="auto", tag_field="type"):
    """The model decides."""

    disable_parallel_tool_use: bool | None = None


class AnyToolChoice(Struct, frozen=True, kw_only=True, tag="any", tag_field="type"):
    """At least one call, of any tool."""

    disable_parallel_tool_use: bool | None = None


class NamedTool(Struct, frozen=True, kw_only=True, tag="tool", tag_field="type"):
    """This one tool is to be called."""

    name: ToolName
    disable_parallel_tool_use: bool | None = None


class NoToolChoice(Struct, frozen=True, kw_only=True, tag="none", tag_field="type"):
    """No call."""


AnthropicToolChoice: TypeAlias = AutoToolChoice | AnyToolChoice | NamedTool | NoToolChoice
"""Whether tools are called, and which."""


def anthropic_tools(tools: Sequence[AnthropicTool] | None) -> tuple[FunctionTool, ...]:
    """The tools of a request, free of this dialect.

    Raises:
        UnsupportedParameterError: One is Anthropic's own, or is to be called in another way.
        InvalidRequestError: Two have the same name, or a schema is missing, no JSON object or too
            long.
    """
    given = tools or ()
    allowance = schemas_allowance()
    read = tuple(
        _tool(tool, allowance, where=f"tools[{index}].") for index, tool in enumerate(given)
    )
    check_unique_names((f"tools[{index}].name", tool.name) for index, tool in enumerate(given))
    return read


def anthropic_tool_choice(
    choice: AnthropicToolChoice | None, tools: Sequence[FunctionTool]
) -> ToolChoice:
    """Return the choice of tools, checked by :func:`check_tool_choice`."""
    match choice:
        case NoToolChoice():
            asked = ToolChoice(ToolChoiceMode.NONE)
        case AutoToolChoice(disable_parallel_tool_use=is_single):
            asked = ToolChoice(ToolChoiceMode.AUTO, None, not is_single)
        case AnyToolChoice(disable_parallel_tool_use=is_single):
            asked = ToolChoice(ToolChoiceMode.REQUIRED, None, not is_single)
        case NamedTool(name=name, disable_parallel_tool_use=is_single):
            asked = ToolChoice(ToolChoiceMode.REQUIRED, name, not is_single)
        case _:
            asked = ToolChoice()
    check_tool_choice(asked, tools, param="tool_choice")
    return asked


def _tool(tool: AnthropicTool, allowance: Allowance, *, where: str) -> FunctionTool:
    if tool.type not in (None, _CUSTOM):
        raise _not_custom(tool.type or "", param=f"{where}type")
    refuse_unsupported(tool, where=where)
    param = f"{where}input_schema"
    if not is_given(tool.input_schema):
        raise InvalidRequestError.at(param, "required, but missing")
    parameters = parameters_of(tool.input_schema, param=param, allowance=allowance)
    return FunctionTool(
        name=tool.name,
        description=tool.description,
        parameters=parameters,
    )


def _not_custom(type_: str, *, param: str) -> InvalidRequestError:
    kind = next((one for one in _SERVER_TOOLS if type_.startswith(one)), None)
    if kind is None:
        return InvalidRequestError.at(param, f'expected "{_CUSTOM}"')
    return UnsupportedParameterError.at(
        param, f'{kind} tools are not supported; send tools of the type "{_CUSTOM}"'
    )
