"""Chat requests: what is accepted, what is refused by name, and what comes out."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET

from machd.dialects.chat.request import ChatCompletionRequest
from machd.dialects.wire.decoding import decode_body
from machd.dialects.wire.refusal import neutral_values
from machd.errors import InvalidRequestError, UnsupportedParameterError
from machd.request.constraint import Constraint, ConstraintKind
from machd.request.conversation import Conversation, FunctionTool, ToolChoice, ToolChoiceMode
from machd.request.generation import WHOLE_ROOM, GenerationOptions, SamplingParams

_MESSAGES: list[dict[str, object]] = [{"role": "user", "content": "hi"}]


def _request(**fields: object) -> ChatCompletionRequest:
    whole = {"model": "m", "messages": _MESSAGES, **fields}
    return decode_body(json.dumps(whole).encode(), ChatCompletionRequest).checked()


def test_defaults_are_those_of_openai() -> None:
    """A request that says nothing about sampling gets the documented defaults."""
    assert _request().options() == GenerationOptions()


def test_every_option_arrives() -> None:
    """Each supported field ends in the option of its name."""
    options = _request(
        max_completion_tokens=7,
        temperature=0,
        top_p=0.5,
        top_k=40,
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=1,
        frequency_penalty=-1,
        logit_bias={"9": -100, "3": 1.5},
        seed=-3,
        logprobs=True,
        top_logprobs=5,
        stop=["a", "b"],
        stop_token_ids=[5, 4],
        ignore_eos=True,
        n=2,
        stream=True,
        stream_options={"include_usage": True},
        stream_interval=4,
        priority="batch",
    ).options()
    assert options == GenerationOptions(
        sampling=SamplingParams(
            temperature=0.0,
            top_p=0.5,
            top_k=40,
            min_p=0.1,
            repetition_penalty=1.1,
            presence_penalty=1.0,
            frequency_penalty=-1.0,
            logit_bias=((3, 1.5), (9, -100.0)),
            top_logprobs=5,
        ),
        max_tokens=7,
        seed=-3,
        stop=("a", "b"),
        stop_token_ids=(5, 4),
        ignore_eos=True,
        n=2,
        stream=True,
        include_usage=True,
        stream_interval=4,
        priority="batch",
    )


@pytest.mark.parametrize(
    ("fields", "name", "value"),
    [
        ({"stop": "x"}, "stop", ("x",)),
        ({"stop": None}, "stop", ()),
        ({"stop": []}, "stop", ()),
        ({"top_k": -1}, "top_k", 0),
        ({"max_tokens": 5}, "max_tokens", 5),
        ({"max_tokens": 5, "max_completion_tokens": 5}, "max_tokens", 5),
        ({"logprobs": True}, "top_logprobs", 0),
        ({"logprobs": False, "top_logprobs": 0}, "top_logprobs", None),
        ({"temperature": None}, "temperature", 1.0),
        ({"priority": None}, "priority", "normal"),
        ({"priority": "interactive"}, "priority", "interactive"),
        ({"priority": -3}, "priority", "interactive"),
        ({"priority": 0}, "priority", "normal"),
        ({"priority": 7}, "priority", "batch"),
        ({"priority": 0, "service_tier": "flex"}, "priority", "normal"),
        ({"stream": True, "stream_options": {}}, "include_usage", False),
        ({"stream_options": {"include_usage": True}}, "include_usage", False),
        ({"max_tokens": 4.0}, "max_tokens", 4),
        ({"max_tokens": -1}, "max_tokens", WHOLE_ROOM),
        ({"n_predict": 5}, "max_tokens", 5),
        ({"max_tokens": 5, "n_predict": 5}, "max_tokens", 5),
        ({"top_p": 0}, "top_k", 1),
        ({"top_p": 0, "top_k": 9}, "top_p", 1.0),
        ({"repeat_penalty": 1.2}, "repetition_penalty", 1.2),
        ({"repeat_penalty": 1.2, "repeat_last_n": -1}, "repetition_penalty", 1.2),
        ({"repeat_last_n": 64}, "repetition_penalty", 1.0),
        ({"min_tokens": 3}, "min_tokens", 3),
        ({"allowed_token_ids": [5, 2, 5]}, "allowed_token_ids", (2, 5)),
        ({"include_stop_str_in_output": True}, "shows_stop", True),
    ],
)
def test_spellings_of_one_option(fields: dict[str, object], name: str, value: object) -> None:
    """Equivalent ways to ask for a thing give the same option."""
    options = _request(**fields).options()
    assert getattr(options if hasattr(options, name) else options.sampling, name) == value


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"top_logprobs": 1, "logprobs": False}, "top_logprobs"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
        ({"max_tokens": 5, "n_predict": 6}, "n_predict"),
        ({"max_tokens": 5, "min_tokens": 6}, "min_tokens"),
        ({"repetition_penalty": 1.1, "repeat_penalty": 1.2}, "repeat_penalty"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"n_predict": 0}, "n_predict"),
    ],
)
def test_contradictions_are_refused(fields: dict[str, object], param: str) -> None:
    """Fields that are fine alone and wrong together are a 400 that names one of them."""
    with pytest.raises(InvalidRequestError) as caught:
        _request(**fields)
    assert caught.value.param == param
    assert caught.value.code == "invalid_request"


_ASKING: dict[str, object] = {
    "audio": {"voice": "alloy"},
    "modalities": ["text", "audio"],
    "moderation": {"model": "m"},
    "web_search_options": {"search_context_size": "low"},
    "echo": True,
    "add_special_tokens": True,
    "skip_special_tokens": False,
    "mirostat": 1,
    "samplers": ["top_k"],
    "reasoning_format": "none",
    "t_max_predict_ms": 5,
    "chat_template": "{{ messages }}",
    "guided_whitespace_pattern": "[ ]",
}


def test_cases_are_refused_fields() -> None:
    """The cases are refused fields; the reference page has all of them, and its test sends them."""
    assert set(neutral_values(ChatCompletionRequest)) > set(_ASKING)


@pytest.mark.parametrize("name", _ASKING)
def test_unsupported_fields_are_refused_by_name(name: str) -> None:
    """A field that would change the answer is never ignored."""
    with pytest.raises(UnsupportedParameterError) as caught:
        _request(**{name: _ASKING[name]})
    assert caught.value.param == name
    assert name in caught.value.message


@pytest.mark.parametrize("name", _ASKING)
@pytest.mark.parametrize("value", [None, [], {}])
def test_unsupported_fields_may_be_empty(name: str, value: object) -> None:
    """A client that sends every field it knows, empty, asks for nothing."""
    assert _request(**{name: value}).options() == GenerationOptions()


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": "none"},
        {"tool_choice": "auto", "tools": []},
        {"function_call": "none"},
        {"response_format": {"type": "text"}},
        {"modalities": ["text"]},
        {"store": False},
        {"add_generation_prompt": True},
        {"continue_final_message": False},
        {"verbosity": None},
        {"verbosity": "low"},
        {"user": "u", "metadata": {"k": "v"}, "service_tier": "auto"},
        {"safety_identifier": "s", "prompt_cache_key": "k", "parallel_tool_calls": True},
        {"prompt_cache_retention": "24h", "prompt_cache_options": {"mode": "implicit"}},
    ],
)
def test_fields_that_change_nothing_are_accepted(fields: dict[str, object]) -> None:
    """Fields that do not change the answer do not change the options."""
    assert _request(**fields).options() == GenerationOptions()


def test_a_number_is_no_boolean() -> None:
    """0 is not taken for false where only false asks for nothing."""
    with pytest.raises(UnsupportedParameterError):
        _request(echo=0)


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user", "content": [{"type": "input_audio"}]}, "messages[0].content[0].type"),
        (
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "file"}]},
            "messages[0].content[1].type",
        ),
        ({"role": "assistant", "audio": {"id": "a"}}, "messages[0].audio"),
    ],
)
def test_unsupported_message_parts_are_refused(message: dict[str, object], param: str) -> None:
    """Fields that the template would not get are refused, with their place."""
    with pytest.raises(UnsupportedParameterError) as caught:
        _request(messages=[message])
    assert caught.value.param == param


def test_template_sees_roles_texts_and_names() -> None:
    """A developer is a system, parts become one text, and names are kept."""
    seen = _request(
        messages=[
            {"role": "developer", "content": "d"},
            {"role": "system", "content": "s"},
            {
                "role": "user",
                "name": "bob",
                "content": [
                    {"type": "text", "text": "a"},
                    {"type": "text", "text": "b"},
                ],
            },
            {"role": "assistant", "content": "c", "tool_calls": None, "refusal": None},
        ]
    ).template_messages()
    assert seen == [
        {"role": "system", "content": "d"},
        {"role": "system", "content": "s"},
        {"role": "user", "content": "ab", "name": "bob"},
        {"role": "assistant", "content": "c"},
    ]


def _called(arguments: str, **fields: object) -> dict[str, object]:
    function = {"name": "add", "arguments": arguments}
    return {
        "role": "assistant",
        "tool_calls": [{"id": "call", "type": "function", "function": function}],
        **fields,
    }


def test_template_sees_calls_thoughts_and_who_answered() -> None:
    """Arguments become an object, and a tool's message gets the name that its call had."""
    seen = _request(
        messages=[
            *_MESSAGES,
            _called('{"a": [1]}', content=None, reasoning_content="hm"),
            {"role": "tool", "content": "4", "tool_call_id": "call"},
            _called("", content="so", reasoning="well"),
            {"role": "tool", "content": "5", "tool_call_id": "other"},
            {"role": "tool", "content": "6", "tool_call_id": "call", "name": "own"},
        ]
    ).template_messages()
    assert seen[1] == {
        "role": "assistant",
        "content": "",
        "reasoning_content": "hm",
        "tool_calls": [
            {
                "id": "call",
                "type": "function",
                "function": {"name": "add", "arguments": {"a": [1]}},
            }
        ],
    }
    assert seen[2] == {"role": "tool", "content": "4", "tool_call_id": "call", "name": "add"}
    assert (seen[3]["content"], seen[3]["reasoning_content"]) == ("so", "well")
    assert seen[3]["tool_calls"][0]["function"]["arguments"] == {}  # type: ignore[index]
    assert "name" not in seen[4]
    assert seen[5]["name"] == "own"


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([_called("[" * 65)], "messages[0].tool_calls[0].function.arguments"),
        (
            [*_MESSAGES, _called("[]," * 12_000), _called("[]," * 12_000)],
            "messages[2].tool_calls[0].function.arguments",
        ),
        (
            [*_MESSAGES, {"role": "tool", "tool_call_id": "c", "content": "4"}, _called("{}")],
            "messages[1].role",
        ),
    ],
)
def test_broken_conversations_about_tools_are_refused(messages: object, param: str) -> None:
    """A message that no template can render is a 400 with its place."""
    with pytest.raises(InvalidRequestError) as caught:
        _request(messages=messages).conversation()
    assert caught.value.param == param
    assert caught.value.code == "invalid_request"


@pytest.mark.parametrize("arguments", ['{"a": ', "[1]", "none", '{"a": 1e999}', '{"a": "\\ud800"}'])
def test_calls_that_were_cut_short_do_not_end_a_conversation(arguments: str) -> None:
    """The daemon's own answers can be sent back to it."""
    seen = _request(messages=[*_MESSAGES, _called(arguments)]).template_messages()
    assert seen[1]["tool_calls"][0]["function"]["arguments"] == {}  # type: ignore[index]


@pytest.mark.parametrize(
    ("message", "content"),
    [
        ({"refusal": "no"}, "no"),
        ({"content": None, "refusal": "no"}, "no"),
        ({"content": "yes", "refusal": "no"}, "yes"),
    ],
)
def test_a_refusal_is_what_the_assistant_said(message: dict[str, object], content: str) -> None:
    """OpenAI keeps it in a field of its own; a template has one text."""
    seen = _request(messages=[{"role": "assistant", **message}]).template_messages()
    assert seen == [{"role": "assistant", "content": content}]


@pytest.mark.parametrize(
    "field", ["thinking_token_budget", "thinking_budget", "thinking_budget_tokens"]
)
def test_every_spelling_of_the_budget_of_thoughts_arrives(field: str) -> None:
    """vLLM's, LM Studio's and that of llama.cpp's page."""
    assert _request(**{field: 9}).conversation().thinking_budget_tokens == 9


_TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def test_every_field_about_the_conversation_arrives() -> None:
    """Tools, choice, shape, thoughts and continuation end in the conversation."""
    conversation = _request(
        messages=[*_MESSAGES, {"role": "assistant", "content": "so"}],
        tools=[_TOOL],
        tool_choice="none",
        parallel_tool_calls=False,
        response_format={"type": "json_object"},
        reasoning_effort="low",
        thinking_token_budget=9,
        add_generation_prompt=False,
        continue_final_message=True,
    ).conversation()
    assert conversation == Conversation(
        messages=[*_MESSAGES, {"role": "assistant", "content": "so"}],
        tools=(FunctionTool("add", parameters={"type": "object"}),),
        tool_choice=ToolChoice(ToolChoiceMode.NONE, allows_parallel=False),
        constraint=Constraint(ConstraintKind.JSON_OBJECT, "", "response_format"),
        thinks=True,
        thinking_budget_tokens=9,
        template_variables={"reasoning_effort": "low"},
        continues_final_message=True,
    )


def test_a_plain_request_asks_for_nothing_more() -> None:
    """A request without those fields is a conversation with the defaults."""
    assert _request().conversation() == Conversation(messages=_MESSAGES)


@pytest.mark.parametrize(
    ("messages", "fields"),
    [
        (_MESSAGES, {"add_generation_prompt": False}),
        ([{"role": "assistant", "content": "so"}], {}),
        ([{"role": "assistant", "content": "so"}], {"add_generation_prompt": True}),
        ([{"role": "assistant", "content": " "}], {"add_generation_prompt": False}),
        ([_called("{}", content="so")], {"add_generation_prompt": False}),
    ],
)
def test_only_an_assistant_s_text_is_continued(messages: object, fields: dict[str, object]) -> None:
    """A continuation needs an open text of the assistant's, and no new turn."""
    with pytest.raises(InvalidRequestError) as caught:
        _request(messages=messages, continue_final_message=True, **fields)
    assert caught.value.param == "continue_final_message"


@pytest.mark.parametrize(
    ("tier", "priority", "expected", "used"),
    [
        (None, None, "normal", UNSET),
        ("auto", None, "normal", "default"),
        ("default", None, "normal", "default"),
        ("scale", None, "normal", "scale"),
        ("flex", None, "batch", "flex"),
        ("priority", None, "interactive", "priority"),
        ("flex", "interactive", "interactive", "flex"),
    ],
)
def test_a_service_tier_is_a_priority(
    tier: str | None, priority: str | None, expected: str, used: object
) -> None:
    """``service_tier`` sets the priority unless ``priority`` does, and the answer repeats it."""
    request = _request(service_tier=tier, priority=priority)
    assert request.options().priority == expected
    assert request.used_tier == used


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_regex": "a", "ignore_eos": True},
        {"tools": [_TOOL], "tool_choice": "required", "ignore_eos": True},
    ],
)
def test_what_has_an_end_does_not_ignore_it(fields: dict[str, object]) -> None:
    """A grammar ends with the end of text, so that end cannot be ignored."""
    with pytest.raises(InvalidRequestError) as caught:
        _request(**fields).conversation()
    assert caught.value.param == "ignore_eos"


def test_token_ids_are_held_against_the_vocabulary() -> None:
    """The last id of the vocabulary passes and the next does not, in both fields."""
    _request(logit_bias={"99": 1}, stop_token_ids=[0, 99]).check_vocabulary(100)
    for fields, param in (
        ({"logit_bias": {"100": 1}}, "logit_bias"),
        ({"stop_token_ids": [100]}, "stop_token_ids"),
    ):
        with pytest.raises(InvalidRequestError, match="token id 100") as caught:
            _request(**fields).check_vocabulary(100)
        assert caught.value.param == param


_optional = {
    "temperature": st.floats(0, 2),
    "top_p": st.floats(0, 1, exclude_min=True),
    "top_k": st.integers(-1, 2**31 - 1),
    "min_p": st.floats(0, 1),
    "n": st.integers(1, 128),
    "seed": st.integers(-(2**63), 2**63 - 1),
    "max_tokens": st.integers(1, 2**31 - 1),
    "stop": st.lists(st.text(min_size=1, max_size=9), max_size=16),
    "logit_bias": st.dictionaries(
        st.integers(0, 2**31 - 1).map(str), st.floats(-100, 100), max_size=5
    ),
    "stream": st.booleans(),
    "user": st.text(max_size=512),
    "tools": st.sampled_from([None, [], [_TOOL]]),
    "tool_choice": st.sampled_from([None, "none", "auto"]),
    "guided_json": st.sampled_from([None, {"type": "string"}, '{"type": "string"}']),
    "thinking_budget": st.integers(0, 2**31 - 1),
}


@given(fields=st.fixed_dictionaries({}, optional=_optional), text=st.text())
def test_encoding_and_decoding_give_the_same_request(fields: dict[str, object], text: str) -> None:
    """A valid request is accepted, and written out again it reads the same."""
    request = _request(messages=[{"role": "user", "content": text}], **fields)
    again = decode_body(msgspec.json.encode(request), ChatCompletionRequest).checked()
    assert again.options() == request.options()
    assert again.conversation() == request.conversation()
