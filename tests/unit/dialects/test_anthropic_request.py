"""Anthropic's requests: what is accepted, what is refused and where, and what comes out."""

from __future__ import annotations

import json
from typing import Any

import pytest

from machd.dialects.anthropic.request import CountTokensRequest, MessagesRequest
from machd.dialects.wire.decoding import decode_body
from machd.errors import InvalidRequestError, UnsupportedParameterError
from machd.request.constraint import Constraint, ConstraintKind
from machd.request.conversation import Conversation, FunctionTool, ToolChoice, ToolChoiceMode
from machd.request.generation import GenerationOptions, SamplingParams

_TOOL = {"name": "weather", "input_schema": {"type": "object"}}
_SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
_PREFILLED = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "well"}]
_CANARY = "xyzzy-canary"


def _request(**fields: object) -> MessagesRequest:
    whole = {
        "model": "m",
        "max_tokens": 9,
        "messages": [{"role": "user", "content": "hi"}],
        **fields,
    }
    return decode_body(json.dumps(whole).encode(), MessagesRequest).checked()


def _conversation(**fields: object) -> Conversation:
    return _request(**fields).conversation()


def test_a_plain_request_asks_for_no_thoughts_and_no_tools() -> None:
    """Anthropic's default is an answer without thoughts, whatever the template would do."""
    assert _request().options() == GenerationOptions(max_tokens=9)
    assert _conversation() == Conversation([{"role": "user", "content": "hi"}], thinks=False)


def test_every_option_arrives() -> None:
    """Each field of sampling ends in the option of its meaning."""
    assert _request(
        temperature=0, top_p=0.5, top_k=40, stop_sequences=["a", "b"], stream=True
    ).options() == GenerationOptions(
        sampling=SamplingParams(temperature=0.0, top_p=0.5, top_k=40),
        max_tokens=9,
        stop=("a", "b"),
        stream=True,
    )


@pytest.mark.parametrize(
    "field",
    [
        "system",
        "stop_sequences",
        "stream",
        "temperature",
        "top_p",
        "top_k",
        "metadata",
        "tools",
        "tool_choice",
        "thinking",
        "output_config",
        "output_format",
        "service_tier",
        "container",
        "mcp_servers",
        "context_management",
        "cache_control",
    ],
)
def test_null_is_the_default(field: str) -> None:
    """A field that is null is as good as one that is left out."""
    assert _request(**{field: None}).options() == _request().options()
    assert _conversation(**{field: None}) == _conversation()


def test_what_changes_nothing_is_accepted() -> None:
    """Hints about caches, tiers and users are taken and do not change what is asked."""
    fields: dict[str, Any] = {
        "metadata": {"user_id": "u"},
        "service_tier": "standard_only",
        "cache_control": {"type": "ephemeral", "ttl": "1h"},
        "mcp_servers": [],
        "container": {},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "inference_geo": "eu",
        "speed": "standard",
        "diagnostics": {"previous_message_id": None},
        "never_heard_of": 1,
    }
    assert _request(**fields).options() == _request().options()
    assert _conversation(**fields) == _conversation()


@pytest.mark.parametrize("keep", ["all", {"type": "all"}])
@pytest.mark.parametrize("indent", [None, 12])
def test_to_keep_all_thoughts_is_no_edit(keep: object, indent: int | None) -> None:
    """Both spellings ask for nothing, however the JSON is laid out; any other asks for something."""

    def sent(kept: object) -> bytes:
        edits = [{"type": "clear_thinking_20251015", "keep": kept}]
        body = {
            "model": "m",
            "max_tokens": 9,
            "messages": [{"role": "user", "content": "hi"}],
            "context_management": {"edits": edits},
        }
        return json.dumps(body, indent=indent).encode()

    assert decode_body(sent(keep), MessagesRequest).checked().options() == _request().options()
    with pytest.raises(UnsupportedParameterError) as error:
        decode_body(sent({"type": "thinking_turns", "value": 1}), MessagesRequest).checked()
    assert error.value.param == "context_management"


def test_more_tools_than_openai_takes_are_accepted() -> None:
    """Anthropic has no limit of tools; coding agents with many tool servers send hundreds."""
    tools = [{"name": f"f{index}", "input_schema": {}} for index in range(512)]
    assert len(_conversation(tools=tools).tools) == 512


@pytest.mark.parametrize(
    ("thinking", "thinks", "budget_tokens", "shows"),
    [
        ({"type": "enabled", "budget_tokens": 5}, True, 5, True),
        ({"type": "enabled", "budget_tokens": 5, "display": "omitted"}, True, 5, False),
        ({"type": "adaptive"}, None, None, True),
        ({"type": "adaptive", "display": "summarized"}, None, None, True),
        ({"type": "disabled"}, False, None, True),
    ],
)
def test_thinking(
    thinking: dict[str, object],
    thinks: bool | None,  # noqa: FBT001
    budget_tokens: int | None,
    shows: bool,  # noqa: FBT001
) -> None:
    """Each way to think is what it says, with its budget and what is shown of it."""
    request = _request(thinking=thinking)
    conversation = request.conversation()
    assert (conversation.thinks, conversation.thinking_budget_tokens) == (thinks, budget_tokens)
    assert request.shows_thoughts is shows


def test_a_prefilled_answer_does_not_think() -> None:
    """What goes on from a text cannot begin with a thought: left open it does not, asked it fails."""
    assert _conversation(messages=_PREFILLED, thinking={"type": "adaptive"}).thinks is False
    with pytest.raises(InvalidRequestError) as error:
        _conversation(messages=_PREFILLED, thinking={"type": "enabled", "budget_tokens": 5})
    assert error.value.param == "thinking"


def test_tools_arrive_in_order() -> None:
    """A tool keeps its name, words and schema; ``custom`` is the unsaid type."""
    conversation = _conversation(
        tools=[
            {
                **_TOOL,
                "type": "custom",
                "description": "d",
                "strict": True,
                "cache_control": {"type": "ephemeral"},
                "allowed_callers": ["direct"],
                "defer_loading": False,
            },
            {"name": "b" * 128, "input_schema": _SCHEMA},
        ]
    )
    assert conversation.tools == (
        FunctionTool("weather", "d", {"type": "object"}),
        FunctionTool("b" * 128, None, _SCHEMA),
    )
    assert conversation.tool_choice == ToolChoice()


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, ToolChoice()),
        ({"type": "none"}, ToolChoice(ToolChoiceMode.NONE)),
        ({"type": "any"}, ToolChoice(ToolChoiceMode.REQUIRED)),
        ({"type": "tool", "name": "weather"}, ToolChoice(ToolChoiceMode.REQUIRED, "weather")),
        (
            {"type": "auto", "disable_parallel_tool_use": True},
            ToolChoice(allows_parallel=False),
        ),
        (
            {"type": "any", "disable_parallel_tool_use": True},
            ToolChoice(ToolChoiceMode.REQUIRED, allows_parallel=False),
        ),
        (
            {"type": "tool", "name": "weather", "disable_parallel_tool_use": True},
            ToolChoice(ToolChoiceMode.REQUIRED, "weather", allows_parallel=False),
        ),
    ],
)
def test_tool_choices(choice: dict[str, object], expected: ToolChoice) -> None:
    """Each of Anthropic's choices has its counterpart."""
    assert _conversation(tools=[_TOOL], tool_choice=choice).tool_choice == expected


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"output_config": {"format": {"type": "json_schema", "schema": _SCHEMA}}},
         "output_config.format.schema"),
        ({"output_format": {"type": "json_schema", "schema": _SCHEMA}}, "output_format.schema"),
    ],
)  # fmt: skip
def test_structured_output(fields: dict[str, object], param: str) -> None:
    """A schema for the answer becomes a constraint that knows where it came from."""
    constraint = _conversation(**fields).constraint
    assert constraint is not None
    assert json.loads(constraint.source) == _SCHEMA
    assert constraint == Constraint(ConstraintKind.JSON_SCHEMA, constraint.source, param)


def test_effort_is_the_templates() -> None:
    """The word goes to the template, where thoughts are asked for or not."""
    variables = _conversation(output_config={"effort": "low"}).template_variables
    assert variables == {"reasoning_effort": "low"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": "9"}, "max_tokens"),
        ({"temperature": 1.01}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"stop_sequences": "STOP"}, "stop_sequences"),
        ({"stop_sequences": [""]}, "stop_sequences[0]"),
        ({"stop_sequences": ["x"] * 65}, "stop_sequences"),
        ({"stream": 1}, "stream"),
        ({"service_tier": _CANARY}, "service_tier"),
        ({"metadata": {"user_id": "x" * 513}}, "metadata.user_id"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens"),
        ({"thinking": {"type": _CANARY}}, "thinking.type"),
        ({"system": [{"type": "image"}]}, "system[0].type"),
        ({"system": {"text": _CANARY}}, "system"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": _CANARY, "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": _CANARY}]}]},
         "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]},
         "messages[0].content[0].text"),
        ({"tools": [{"name": _CANARY + "!", "input_schema": {}}]}, "tools[0].name"),
        ({"tools": [{"name": "a\n", "input_schema": {}}]}, "tools[0].name"),
        ({"tools": [{"name": "a"}]}, "tools[0].input_schema"),
        ({"tools": [{"name": "a", "input_schema": [1]}]}, "tools[0].input_schema"),
        ({"tools": [{**_TOOL, "type": _CANARY}]}, "tools[0].type"),
        ({"tools": [_TOOL, _TOOL]}, "tools[1].name"),
        ({"tools": [_TOOL], "tool_choice": {"type": _CANARY}}, "tool_choice.type"),
        ({"tools": [_TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": [_TOOL], "tool_choice": {"type": "tool", "name": "no"}}, "tool_choice"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [{"name": str(i), "input_schema": {}} for i in range(513)]}, "tools"),
        ({"output_config": {"effort": _CANARY}}, "output_config.effort"),
        ({"output_config": {"format": {"type": _CANARY}}}, "output_config.format.type"),
        ({"output_config": {"format": {"type": "json_schema", "schema": 1}}},
         "output_config.format.schema"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {}}},
          "output_format": {"type": "json_schema", "schema": {"type": "null"}}}, "output_format.schema"),
    ],
)  # fmt: skip
def test_mistakes_are_told_by_their_place(fields: dict[str, object], param: str) -> None:
    """What is out of bounds or out of place is refused there, and nothing of it is quoted."""
    with pytest.raises(InvalidRequestError) as error:
        _conversation(**fields)
    assert error.value.param == param
    assert error.value.code == "invalid_request"
    assert _CANARY not in error.value.message


@pytest.mark.parametrize(
    ("fields", "param", "word"),
    [
        ({"container": "c"}, "container", "container"),
        ({"mcp_servers": [{"type": "url"}]}, "mcp_servers", "mcp_servers"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
         "context_management", "context_management"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
         "tools[0].type", "web_search"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type", "bash"),
        ({"tools": [{**_TOOL, "defer_loading": True}]}, "tools[0].defer_loading", "defer_loading"),
    ],
)  # fmt: skip
def test_what_machd_does_not_do_is_refused_by_name(
    fields: dict[str, object], param: str, word: str
) -> None:
    """A field or tool that would change the answer is refused with its name, never ignored."""
    with pytest.raises(UnsupportedParameterError) as error:
        _conversation(**fields)
    assert error.value.param == param
    assert word in error.value.message


@pytest.mark.parametrize("depth", [70, 500])
@pytest.mark.parametrize("place", ["messages[1].content[0].input", "tools[0].input_schema"])
def test_deep_values_are_refused(depth: int, place: str) -> None:
    """What a template could not write out without end is a 400 with its place."""
    deep = json.loads('{"a":' * depth + "1" + "}" * depth)
    call = {"type": "tool_use", "id": "1", "name": "a", "input": deep}
    result = {"type": "tool_result", "tool_use_id": "1"}
    fields: dict[str, dict[str, object]] = {
        "tools[0].input_schema": {"tools": [{"name": "a", "input_schema": deep}]},
        "messages[1].content[0].input": {
            "messages": [
                {"role": "user", "content": "hi"},
                {"role": "assistant", "content": [call]},
                {"role": "user", "content": [result]},
            ]
        },
    }
    with pytest.raises(InvalidRequestError) as error:
        _conversation(**fields[place])
    assert error.value.param == place


def test_counting_needs_no_max_tokens() -> None:
    """The same body without ``max_tokens`` counts; with it, it counts as well."""
    plain = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "system": "s"}
    for body in (plain, {**plain, "max_tokens": 9, "stop_sequences": ["x"]}):
        counted = decode_body(json.dumps(body).encode(), CountTokensRequest).checked()
        assert counted.conversation() == _conversation(system="s")
    with pytest.raises(UnsupportedParameterError):
        decode_body(
            json.dumps({**plain, "mcp_servers": [1]}).encode(), CountTokensRequest
        ).checked()
