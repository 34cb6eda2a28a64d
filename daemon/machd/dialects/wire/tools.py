"""Tools as OpenAI's chat completions write them, and the checks that every dialect shares."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import UNSET, Meta, Struct

from machd.dialects.wire.bounds import MAX_TOOL_SCHEMAS_BYTES, MAX_TOOLS, Description, ToolName
from machd.dialects.wire.raw_json import Allowance, OptionalSchema, is_given, raw_object
from machd.errors import InvalidRequestError
from machd.request.conversation import FunctionTool, ToolChoice, ToolChoiceMode


class FunctionDefinition(Struct, frozen=True, kw_only=True):
    """A function that the model may call.

    Attributes:
        parameters: JSON schema of its arguments, an object; any object will do without one.
        strict: Accepted; where a grammar holds, it follows the schema whatever this says.
    """

    name: ToolName
    description: Description | None = None
    parameters: OptionalSchema = UNSET
    strict: bool | None = None


class ChatTool(Struct, frozen=True, kw_only=True, tag="function", tag_field="type"):
    """A tool; functions are the only kind."""

    function: FunctionDefinition


class FunctionName(Struct, frozen=True, kw_only=True):
    """A function by its name."""

    name: ToolName


class NamedToolChoice(Struct, frozen=True, kw_only=True, tag="function", tag_field="type"):
    """This one function is to be called."""

    function: FunctionName


class AllowedTools(Struct, frozen=True, kw_only=True):
    """Some of the tools, and whether one of them has to be called."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedToolChoice], Meta(min_length=1, max_length=MAX_TOOLS)]


class AllowedToolsChoice(Struct, frozen=True, kw_only=True, tag="allowed_tools", tag_field="type"):
    """These tools alone may be called, as if there were no others."""

    allowed_tools: AllowedTools


ChatToolList: TypeAlias = Annotated[list[ChatTool], Meta(max_length=MAX_TOOLS)]
"""The tools of a request; their names are unique."""

ChatToolChoice: TypeAlias = (
    Literal["none", "auto", "required"] | NamedToolChoice | AllowedToolsChoice
)
"""Whether tools are called, and which."""


LegacyFunctionList: TypeAlias = Annotated[list[FunctionDefinition], Meta(max_length=MAX_TOOLS)]
"""``functions``: what OpenAI's API had before tools."""

LegacyFunctionChoice: TypeAlias = Literal["none", "auto"] | FunctionName
"""``function_call``: whether one is called, and which."""


def legacy_tool_choice(
    choice: LegacyFunctionChoice | None, functions: Sequence[FunctionDefinition]
) -> tuple[ToolChoice, tuple[FunctionTool, ...]]:
    """The tool choice that ``function_call`` stands for, and the functions as tools.

    An answer holds one call at the most: a message of that time has room for one.

    Raises:
        InvalidRequestError: As for tools; the choice names a function that is not there.
    """
    tools = chat_tools([ChatTool(function=one) for one in functions])
    if isinstance(choice, FunctionName):
        asked = ToolChoice(ToolChoiceMode.REQUIRED, choice.name, allows_parallel=False)
    else:
        asked = ToolChoice(ToolChoiceMode(choice or "auto"), allows_parallel=False)
    check_tool_choice(asked, tools, param="function_call")
    return asked, tools


def chat_tools(tools: Sequence[ChatTool] | None) -> tuple[FunctionTool, ...]:
    """The tools of a request, free of this dialect.

    Raises:
        InvalidRequestError: Two have the same name, or parameters are no JSON object or too long.
    """
    functions = [tool.function for tool in tools or ()]
    check_unique_names(
        (f"tools[{index}].function.name", one.name) for index, one in enumerate(functions)
    )
    allowance = schemas_allowance()
    return tuple(
        FunctionTool(
            name=one.name,
            description=one.description,
            parameters=parameters_of(
                one.parameters, param=f"tools[{index}].function.parameters", allowance=allowance
            ),
        )
        for index, one in enumerate(functions)
    )


def chat_tool_choice(
    choice: ChatToolChoice | None,
    tools: tuple[FunctionTool, ...],
    *,
    parallel_tool_calls: bool | None,
) -> tuple[ToolChoice, tuple[FunctionTool, ...]]:
    """Return the choice of tools, checked, and the tools that may be called."""
    mode, name = ToolChoiceMode.AUTO, None
    if isinstance(choice, str):
        mode = ToolChoiceMode(choice)
    elif isinstance(choice, NamedToolChoice):
        mode, name = ToolChoiceMode.REQUIRED, choice.function.name
    elif isinstance(choice, AllowedToolsChoice):
        mode = ToolChoiceMode(choice.allowed_tools.mode)
        tools = _allowed(choice.allowed_tools, tools)
    asked = ToolChoice(mode, name, allows_parallel=parallel_tool_calls is not False)
    check_tool_choice(asked, tools, param="tool_choice")
    return asked, tools


def check_unique_names(names: Iterable[tuple[str, str]]) -> None:
    """Raise InvalidRequestError at the second place if two of the (place, name) pairs have one name."""
    seen: dict[str, str] = {}
    for place, name in names:
        if name in seen:
            raise InvalidRequestError.at(place, f"the same name as at {seen[name]}")
        seen[name] = place


def check_tool_choice(choice: ToolChoice, tools: Sequence[FunctionTool], *, param: str) -> None:
    """Raise InvalidRequestError if a call is asked for without tools, or of a tool that is not there."""
    if choice.mode is not ToolChoiceMode.REQUIRED:
        return
    if not tools:
        raise InvalidRequestError.at(param, "asks for a call, and there are no tools")
    if choice.name is not None and choice.name not in {tool.name for tool in tools}:
        raise InvalidRequestError.at(param, "names a function that is not in tools")


def schemas_allowance() -> Allowance:
    """Return the bound on the schemas of one request's tools together."""
    return Allowance(length_bytes=MAX_TOOL_SCHEMAS_BYTES)


def parameters_of(
    raw: OptionalSchema, *, param: str, allowance: Allowance | None = None
) -> dict[str, object] | None:
    """The schema of a tool's arguments, read by :func:`raw_object`; None where it takes any object."""
    if not is_given(raw):
        return None
    return raw_object(raw, param=param, allowance=allowance)


def past_arguments(
    text: str, *, param: str, allowance: Allowance | None = None
) -> dict[str, object]:
    """The arguments of a call that the model made earlier, as an object for the template.

    A call that ``max_tokens`` cut short, or that a weak model misspelled, comes back as the client
    got it. Refusing it would end the conversation, so what is no JSON object is an empty one.

    Raises:
        InvalidRequestError: They are nested too deeply or have too many parts.
    """
    (allowance or Allowance()).take(text, param=param)
    try:
        decoded = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeEncodeError):
        return {}
    return decoded if isinstance(decoded, dict) else {}


def _allowed(allowed: AllowedTools, tools: tuple[FunctionTool, ...]) -> tuple[FunctionTool, ...]:
    by_name = {tool.name: tool for tool in tools}
    names = {one.function.name for one in allowed.tools}
    if not names <= by_name.keys():
        raise InvalidRequestError(
            "tool_choice.allowed_tools.tools: names a function that is not in tools",
            param="tool_choice",
        )
    return tuple(tool for tool in tools if tool.name in names)
