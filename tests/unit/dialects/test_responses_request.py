"""The body of ``POST /v1/responses``: what it means, and what it is refused for."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from machd.dialects.responses.request import ResponsesRequest
from machd.dialects.responses.tools import custom_input
from machd.dialects.wire.decoding import decode_body
from machd.errors import InvalidRequestError, UnsupportedParameterError
from machd.request.constraint import Constraint, ConstraintKind
from machd.request.conversation import Conversation, FunctionTool, ToolChoice, ToolChoiceMode
from machd.request.generation import GenerationOptions, SamplingParams

_SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
_TOOL = {"type": "function", "name": "add", "parameters": _SCHEMA}
_OTHER = {"type": "function", "name": "sub"}


def _request(**fields: object) -> ResponsesRequest:
    body = json.dumps({"model": "m", "input": "hi", **fields}).encode()
    return decode_body(body, ResponsesRequest).checked()


def _refusal(**fields: object) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        _request(**fields)
    return caught.value


def _conversation(**fields: object) -> Conversation:
    request = _request(**fields)
    return request.continued(request.chain(previous=(), referenced={}))


def test_a_text_is_what_the_user_says() -> None:
    """The shortest request: one message, every default OpenAI's."""
    assert _conversation() == Conversation(
        [{"role": "user", "content": "hi"}], messages_param="input"
    )
    request = _request()
    assert request.options() == GenerationOptions()
    assert request.is_stored
    assert not _request(store=False).is_stored


def test_null_is_the_default_throughout() -> None:
    """Every field but model and input may be null, and then says nothing."""
    names = [
        field.name
        for field in msgspec.structs.fields(ResponsesRequest)
        if field.name not in ("model", "input")
    ]
    request = _request(**dict.fromkeys(names))
    assert request.options() == GenerationOptions()
    assert request.continued(request.chain(previous=(), referenced={})) == _conversation()


def test_options_are_read() -> None:
    """What shapes sampling reaches the generation, OpenAI's fields and the extensions alike."""
    options = _request(
        max_output_tokens=7,
        temperature=0,
        top_p=0.5,
        top_k=-1,
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=-0.2,
        seed=3,
        stop="x",
        stream=True,
        stream_options={"include_obfuscation": False},
        stream_interval=4,
    ).options()
    assert options == GenerationOptions(
        sampling=SamplingParams(
            temperature=0.0,
            top_p=0.5,
            top_k=0,
            min_p=0.1,
            repetition_penalty=1.1,
            presence_penalty=0.2,
            frequency_penalty=-0.2,
        ),
        max_tokens=7,
        seed=3,
        stop=("x",),
        stream=True,
        stream_interval=4,
    )


@pytest.mark.parametrize(
    ("fields", "top_logprobs"),
    [
        ({}, None),
        ({"top_logprobs": 0}, None),
        ({"top_logprobs": 3}, 3),
        ({"include": ["message.output_text.logprobs"]}, 0),
        ({"include": ["message.output_text.logprobs"], "top_logprobs": 2}, 2),
        ({"include": ["reasoning.encrypted_content"]}, None),
    ],
)
def test_logprobs_come_when_they_are_asked_for(
    fields: dict[str, Any], top_logprobs: int | None
) -> None:
    """By ``include``, or by a number of alternatives."""
    assert _request(**fields).options().sampling.top_logprobs == top_logprobs


@pytest.mark.parametrize(
    ("fields", "priority"),
    [
        ({}, "normal"),
        ({"service_tier": "auto"}, "normal"),
        ({"service_tier": "flex"}, "batch"),
        ({"service_tier": "priority"}, "interactive"),
        ({"service_tier": "flex", "priority": "interactive"}, "interactive"),
    ],
)
def test_tiers_are_priorities(fields: dict[str, Any], priority: str) -> None:
    """As in chat completions; machd's own field goes first."""
    assert _request(**fields).options().priority == priority


@pytest.mark.parametrize(
    ("format_", "constraint"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, Constraint(ConstraintKind.JSON_OBJECT, "", "text.format")),
        (
            {"type": "json_schema", "name": "n", "schema": _SCHEMA, "strict": True},
            Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(_SCHEMA), "text.format.schema"),
        ),
    ],
)
def test_the_format_becomes_a_constraint(
    format_: dict[str, Any], constraint: Constraint | None
) -> None:
    """Each of OpenAI's three formats; errors about a schema name its field."""
    assert _conversation(text={"format": format_}).constraint == constraint


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, ToolChoice()),
        ("none", ToolChoice(ToolChoiceMode.NONE)),
        ("required", ToolChoice(ToolChoiceMode.REQUIRED)),
        ({"type": "function", "name": "add"}, ToolChoice(ToolChoiceMode.REQUIRED, "add")),
    ],
)
def test_tools_are_flat(choice: object, expected: ToolChoice) -> None:
    """A tool carries its name itself, and a choice names it the same way."""
    conversation = _conversation(tools=[_TOOL, _OTHER], tool_choice=choice)
    assert conversation.tools == (FunctionTool("add", None, _SCHEMA), FunctionTool("sub"))
    assert conversation.tool_choice == expected


def test_allowed_tools_are_all_that_there_are() -> None:
    """The others are not shown at all, and calls come one at a time if that is asked."""
    conversation = _conversation(
        tools=[_TOOL, _OTHER],
        tool_choice={
            "type": "allowed_tools",
            "mode": "required",
            "tools": [{"type": "function", "name": "sub"}],
        },
        parallel_tool_calls=False,
    )
    assert [tool.name for tool in conversation.tools] == ["sub"]
    assert conversation.tool_choice == ToolChoice(ToolChoiceMode.REQUIRED, allows_parallel=False)


@pytest.mark.parametrize(
    ("effort", "thinks"), [(None, None), ("none", False), ("minimal", True), ("high", True)]
)
def test_effort_says_whether_to_think(effort: str | None, thinks: bool | None) -> None:  # noqa: FBT001
    """As ``reasoning_effort`` does in chat completions."""
    assert _conversation(reasoning={"effort": effort, "summary": "auto"}).thinks == thinks


@pytest.mark.parametrize(
    "kind",
    [
        "apply_patch",
        "code_interpreter",
        "computer",
        "computer_use_preview",
        "file_search",
        "image_generation",
        "local_shell",
        "mcp",
        "namespace",
        "shell",
        "tool_search",
        "web_search",
        "web_search_preview",
    ],
)
class TestToolsThatAreNotServed:
    """Agents bring them with every request, whether the model is to call them or not."""

    @staticmethod
    def _tool(kind: str) -> dict[str, Any]:
        return {
            "type": kind,
            "external_web_access": False,
            "server_label": "x",
            "vector_store_ids": ["v"],
            "name": "add",
            "tools": [_OTHER],
        }

    def test_they_are_left_out(self, kind: str) -> None:
        """As if there were only the others, even if they share a name; the kinds are told."""
        tools = [self._tool(kind), _TOOL, self._tool(kind)]
        assert _conversation(tools=tools) == _conversation(tools=[_TOOL])
        assert _conversation(tools=tools[:1]) == _conversation()
        assert _conversation(tools=tools, tool_choice="required") == _conversation(
            tools=[_TOOL], tool_choice="required"
        )
        assert _request(tools=tools).left_out_kinds == [kind]

    def test_others_keep_their_places(self, kind: str) -> None:
        """A mistake in a function is found where the client wrote it."""
        tools = [_TOOL, self._tool(kind), {**_OTHER, "parameters": [1]}]
        assert _refusal(tools=tools).param == "tools[2].parameters"
        assert _refusal(tools=[*tools[:2], _TOOL]).param == "tools[2].name"

    def test_a_choice_that_only_they_could_meet_is_refused(self, kind: str) -> None:
        """By the kind's name: forced by itself, required alone, or the only one allowed."""
        tool = self._tool(kind)
        allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": kind}]}
        for tools, choice, param in (
            ([_TOOL, tool], {"type": kind}, "tool_choice.type"),
            ([tool], "required", "tool_choice"),
            ([_TOOL, tool], allowed, "tool_choice.tools[0].type"),
        ):
            error = _refusal(tools=tools, tool_choice=choice)
            assert isinstance(error, UnsupportedParameterError)
            assert error.param == param
            assert f'"{kind}"' in error.message

    def test_allowed_beside_a_function_they_are_left_out(self, kind: str) -> None:
        """What is allowed need not be called."""
        named = [{"type": kind}, {"type": "function", "name": "sub"}]
        conversation = _conversation(
            tools=[_TOOL, _OTHER, self._tool(kind)],
            tool_choice={"type": "allowed_tools", "mode": "auto", "tools": named},
        )
        assert [tool.name for tool in conversation.tools] == ["sub"]


def test_a_custom_tool_is_a_function_of_one_text() -> None:
    """Its description says so, with the grammar that the input is to follow, if there is one."""
    grammar = {"type": "grammar", "syntax": "lark", "definition": "start: /a+/"}
    custom = {"type": "custom", "name": "patch", "description": "Edits.", "format": grammar}
    conversation = _conversation(
        tools=[_TOOL, custom, {"type": "custom", "name": "note", "format": {"type": "text"}}],
        tool_choice={"type": "custom", "name": "patch"},
    )
    assert conversation.tool_choice == ToolChoice(ToolChoiceMode.REQUIRED, "patch")
    _, patch, note = conversation.tools
    assert patch.name == "patch"
    assert patch.parameters is not None
    assert patch.parameters["properties"] == {"input": {"type": "string"}}
    assert patch.description is not None
    assert patch.description.startswith("Edits.")
    assert patch.description.endswith("lark grammar:\nstart: /a+/")
    assert note.description is not None
    assert "grammar" not in note.description
    assert _refusal(tools=[custom, {**_TOOL, "name": "patch"}]).param == "tools[1].name"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": "a\\nb"}', "a\nb"),
        ('{"input": "a", "more": 1}', "a"),
        ('{"input": 1}', '{"input": 1}'),
        ('{"input": "a', '{"input": "a'),
        ("", ""),
    ],
)
def test_a_custom_tools_input_is_read_if_it_can_be(arguments: str, text: str) -> None:
    """What the model did not write as it should goes to the client as it is."""
    assert custom_input(arguments) == text


def test_the_first_request_of_an_agent_is_taken() -> None:
    """As Codex writes it, with the tools that it always brings; and its probe without input."""
    conversation = _conversation(
        instructions="be",
        input=[
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]}
        ],
        tools=[
            {**_TOOL, "strict": False},
            {"type": "local_shell"},
            {"type": "web_search", "external_web_access": False},
            {"type": "namespace", "name": "mcp__x", "description": "d", "tools": [_OTHER]},
            {"type": "image_generation", "output_format": "png"},
            {"type": "custom", "name": "patch", "format": {"type": "text"}},
        ],
        tool_choice="auto",
        parallel_tool_calls=False,
        reasoning={"effort": "medium", "summary": "auto"},
        store=False,
        stream=True,
        include=["reasoning.encrypted_content"],
        prompt_cache_key="0199",
        client_metadata={"x": "y"},
    )
    assert [tool.name for tool in conversation.tools] == ["add", "patch"]
    assert _conversation(input=[], instructions="be").messages == [
        {"role": "system", "content": "be"}
    ]
    assert _conversation(input=[]).messages == []


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"context_management": [{"type": "compaction"}]}, "context_management"),
        ({"moderation": {"model": "m"}}, "moderation"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"reasoning": {"mode": "pro"}}, "reasoning.mode"),
        ({"reasoning": {"context": "all_turns"}}, "reasoning.context"),
        ({"max_tokens": 3}, "max_tokens"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"logit_bias": {"1": 2}}, "logit_bias"),
        ({"n": 2}, "n"),
        ({"chat_template": "{{ x }}"}, "chat_template"),
    ],
)
def test_what_is_not_done_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    """Nothing that would change the answer is passed over in silence."""
    error = _refusal(**fields)
    assert isinstance(error, UnsupportedParameterError)
    assert error.param == param


@pytest.mark.parametrize(
    "fields",
    [
        {"background": False},
        {"text": {"verbosity": "medium"}},
        {"reasoning": {"mode": "standard", "context": "auto", "generate_summary": "concise"}},
        {"n": 1},
        {"prompt_cache_retention": "24h", "prompt_cache_options": {"mode": "implicit"}},
        {"max_tool_calls": 3},
        {"include": ["web_search_call.action.sources", "code_interpreter_call.outputs"]},
        {"include": ["file_search_call.results", "message.input_image.image_url"]},
        {"include": ["computer_call_output.output.image_url"]},
        {"no_such_field": 1},
    ],
)
def test_what_asks_for_nothing_is_accepted(fields: dict[str, Any]) -> None:
    """Default values and unknown fields are accepted."""
    assert _conversation(**fields) == _conversation()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": [{"role": "root", "content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "web_search_call", "id": "ws_1"}]}, "input[0].type"),
        ({"input": [{"content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0].output"),
        ({"input": [{"type": "item_reference"}]}, "input[0].id"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": 2.5}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"truncation": "some"}, "truncation"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"include": ["everything"]}, "include[0]"),
        ({"input": [{"type": "custom_tool_call", "call_id": "c"}]}, "input[0].name"),
        ({"tools": [{"type": "custom"}]}, "tools[0].name"),
        ({"tools": [{"type": "custom", "format": {"type": "x"}}]}, "tools[0].format.type"),
        ({"reasoning": {"effort": "lots"}}, "reasoning.effort"),
        ({"metadata": {str(number): "v" for number in range(17)}}, "metadata"),
        ({"service_tier": "gold"}, "service_tier"),
        ({"tools": [_TOOL, _OTHER, _TOOL]}, "tools[2].name"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{"type": "function", "name": "no good"}]}, "tools[0].name"),
        ({"tools": [{**_TOOL, "parameters": [1]}]}, "tools[0].parameters"),
        ({"tools": [{"type": "hologram"}]}, "tools[0].type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [_TOOL], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice"),
        ({"tools": [_TOOL], "tool_choice": {"type": "function"}}, "tool_choice.name"),
        ({"tools": [_TOOL], "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
        (
            {"text": {"format": {"type": "json_schema", "name": "n", "schema": 1}}},
            "text.format.schema",
        ),
    ],
)
def test_mistakes_name_their_place(fields: dict[str, Any], param: str) -> None:
    """``param`` is the field, spelled as OpenAI's API spells places."""
    error = _refusal(**fields)
    assert error.param == param
    assert error.http_status == 400


@pytest.mark.parametrize(
    ("content", "place"),
    [
        ([{"type": "input_image", "file_id": "f"}], "input[0].content[0].file_id"),
        (
            [{"type": "input_text", "text": "a"}, {"type": "input_file", "file_id": "f"}],
            "input[0].content[1].type",
        ),
        ([{"type": "input_audio", "input_audio": {}}], "input[0].content[0].type"),
        ([{"type": "reasoning_text", "text": "a"}], "input[0].content[0].type"),
    ],
)
def test_parts_that_are_no_text_are_refused(content: list[object], place: str) -> None:
    """In a message and in a call's output alike, by their place."""
    assert _refusal(input=[{"role": "user", "content": content}]).param == place
    output = {"type": "function_call_output", "call_id": "c", "output": content}
    assert _refusal(input=[output]).param == place.replace("content", "output")


def test_references_are_named() -> None:
    """Ids of references in their order, and nothing else's."""
    request = _request(
        input=[
            {"type": "item_reference", "id": "rs_1"},
            {"role": "user", "content": "x", "id": "msg_1"},
            {"type": "item_reference", "id": "fc_1"},
        ]
    )
    assert request.referenced_ids == ["rs_1", "fc_1"]
    assert _request().referenced_ids == []
