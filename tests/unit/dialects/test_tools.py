"""Tools of a request: what they become, and what can be asked of calls."""

from __future__ import annotations

import json

import pytest

from machd.dialects.tokens.request import TokenizeRequest
from machd.dialects.wire.decoding import decode_body
from machd.dialects.wire.tools import (
    AllowedTools,
    AllowedToolsChoice,
    ChatTool,
    ChatToolChoice,
    FunctionName,
    NamedToolChoice,
    chat_tool_choice,
    chat_tools,
    past_arguments,
)
from machd.errors import InvalidRequestError
from machd.request.conversation import FunctionTool, ToolChoice, ToolChoiceMode, template_tool

_ADD = FunctionTool("add")
_SAY = FunctionTool("say")
_TOOLS = (_ADD, _SAY)


def _decoded(*functions: dict[str, object]) -> list[ChatTool]:
    tools = [{"type": "function", "function": one} for one in functions]
    request = decode_body(json.dumps({"prompt": "", "tools": tools}).encode(), TokenizeRequest)
    assert request.tools is not None
    return request.tools


def _named(*names: str) -> list[NamedToolChoice]:
    return [NamedToolChoice(function=FunctionName(name=one)) for one in names]


def _allowed(mode: str, *names: str) -> AllowedToolsChoice:
    tools = AllowedTools(mode=mode, tools=_named(*names))  # type: ignore[arg-type]
    return AllowedToolsChoice(allowed_tools=tools)


def test_tools_keep_everything_and_their_order() -> None:
    """Names, descriptions and schemas arrive as they were sent."""
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2.5, None, "x"]}}}
    tools = chat_tools(
        _decoded(
            {"name": "b", "description": "adds", "parameters": schema, "strict": True},
            {"name": "a", "parameters": None},
        )
    )
    assert tools == (FunctionTool("b", "adds", schema), FunctionTool("a"))
    assert chat_tools(None) == ()


def test_a_template_sees_every_key_of_a_tool() -> None:
    """What was left out is there and empty, because templates do not ask first."""
    schema = {"type": "object", "properties": {"a": {}}}
    assert template_tool(FunctionTool("f", "d", schema)) == {
        "type": "function",
        "function": {"name": "f", "description": "d", "parameters": schema},
    }
    assert template_tool(FunctionTool("f"))["function"] == {
        "name": "f",
        "description": "",
        "parameters": {"type": "object", "properties": {}},
    }


def test_equal_names_are_refused_with_both_places() -> None:
    """The second of two tools with one name is the one at fault."""
    with pytest.raises(InvalidRequestError) as caught:
        chat_tools(_decoded({"name": "a"}, {"name": "b"}, {"name": "a"}))
    assert caught.value.param == "tools[2].function.name"
    assert "tools[0].function.name" in caught.value.message


@pytest.mark.parametrize("parameters", [[], "{}", 1, True])
def test_parameters_are_an_object(parameters: object) -> None:
    """A schema of arguments that is no object is a 400 with its place."""
    with pytest.raises(InvalidRequestError) as caught:
        chat_tools(_decoded({"name": "a"}, {"name": "b", "parameters": parameters}))
    assert caught.value.param == "tools[1].function.parameters"


@pytest.mark.parametrize(
    "schema", [{"description": "x" * 250_000}, {"anyOf": [{}] * 4500}], ids=["long", "branched"]
)
def test_schemas_of_all_tools_share_bounds(schema: dict[str, object]) -> None:
    """Each of five schemas is within its own bound, and the fifth is beyond what they share."""
    functions: list[dict[str, object]] = [
        {"name": f"f{index}", "parameters": schema} for index in range(5)
    ]
    assert len(chat_tools(_decoded(*functions[:4]))) == 4
    with pytest.raises(InvalidRequestError) as caught:
        chat_tools(_decoded(*functions))
    assert caught.value.param == "tools[4].function.parameters"


@pytest.mark.parametrize("text", ["", '{"a": ', "[]", "null", "1e999", '{"a": 1e999}', '"\\ud800"'])
def test_past_arguments_that_are_no_object_are_empty(text: str) -> None:
    """A call that was cut short is still a call, and its conversation goes on."""
    assert past_arguments(text, param="p") == {}


def test_past_arguments_keep_what_they_hold() -> None:
    """Brackets and quotes in texts count as text."""
    arguments = {"a": '[{"\\' * 1000, "\\": [1, {"b": None}]}
    assert past_arguments(json.dumps(arguments), param="p") == arguments


@pytest.mark.parametrize("text", ["[" * 65, '{"a":' * 65, "[]" * 20_001])
def test_past_arguments_are_bounded(text: str) -> None:
    """Depth and number of parts are refused with their place, readable or not."""
    with pytest.raises(InvalidRequestError) as caught:
        past_arguments(text, param="p")
    assert caught.value.param == "p"


@pytest.mark.parametrize(
    ("choice", "expected", "tools"),
    [
        (None, ToolChoice(), _TOOLS),
        ("auto", ToolChoice(), _TOOLS),
        ("none", ToolChoice(ToolChoiceMode.NONE), _TOOLS),
        ("required", ToolChoice(ToolChoiceMode.REQUIRED), _TOOLS),
        (_named("say")[0], ToolChoice(ToolChoiceMode.REQUIRED, "say"), _TOOLS),
        (_allowed("auto", "say"), ToolChoice(), (_SAY,)),
        (_allowed("required", "say", "add"), ToolChoice(ToolChoiceMode.REQUIRED), _TOOLS),
    ],
)
def test_each_choice_is_understood(
    choice: ChatToolChoice | None, expected: ToolChoice, tools: tuple[FunctionTool, ...]
) -> None:
    """Every spelling becomes its mode, and allowed tools are all that is left."""
    assert chat_tool_choice(choice, _TOOLS, parallel_tool_calls=None) == (expected, tools)


@pytest.mark.parametrize(("asked", "allows"), [(None, True), (True, True), (False, False)])
def test_parallel_calls_are_allowed_unless_forbidden(asked: bool | None, allows: bool) -> None:  # noqa: FBT001
    """Only ``false`` keeps an answer to one call."""
    choice, _ = chat_tool_choice("auto", _TOOLS, parallel_tool_calls=asked)
    assert choice.allows_parallel is allows


@pytest.mark.parametrize(
    ("choice", "tools"),
    [
        ("required", ()),
        (_named("add")[0], ()),
        (_named("sub")[0], _TOOLS),
        (_allowed("auto", "sub"), _TOOLS),
        (_allowed("required", "add", "sub"), _TOOLS),
    ],
)
def test_a_choice_that_cannot_be_met_is_refused(
    choice: ChatToolChoice, tools: tuple[FunctionTool, ...]
) -> None:
    """A call of nothing, or of a tool that is not there, is a 400 about ``tool_choice``."""
    with pytest.raises(InvalidRequestError) as caught:
        chat_tool_choice(choice, tools, parallel_tool_calls=None)
    assert caught.value.param == "tool_choice"
