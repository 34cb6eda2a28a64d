"""Ollama's requests: what is done, what is refused by name, and what a template is given."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import msgspec
import pytest
from support.clients.hostile_bodies import HOSTILE_CHAT_BODIES, HostileBody

from machd.dialects.ollama.request import OllamaChatRequest, OllamaGenerateRequest
from machd.dialects.wire.decoding import decode_body
from machd.errors import InvalidRequestError, UnsupportedParameterError
from machd.request.constraint import Constraint, ConstraintKind
from machd.request.conversation import Conversation
from machd.request.generation import WHOLE_ROOM

_HI: list[dict[str, object]] = [{"role": "user", "content": "hi"}]


def _chat(**fields: object) -> OllamaChatRequest:
    body = msgspec.json.encode({"model": "m", "messages": _HI, **fields})
    return decode_body(body, OllamaChatRequest).checked()


def _generate(**fields: object) -> OllamaGenerateRequest:
    body = msgspec.json.encode({"model": "m", "prompt": "hi", **fields})
    return decode_body(body, OllamaGenerateRequest).checked()


def _conversation(*messages: dict[str, object], **fields: object) -> Conversation:
    return _chat(messages=list(messages), **fields).conversation()


def test_defaults_are_ollamas() -> None:
    """A request without options streams and samples with the numbers that Ollama documents."""
    options = _chat().generation()
    sampling = options.sampling
    assert options.stream
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.8, 0.9, 40)
    assert (sampling.repetition_penalty, options.max_tokens, options.seed) == (1.0, None, None)
    assert options.stop == ()
    assert sampling.top_logprobs is None


def test_options_reach_the_generation() -> None:
    """Each option that machd knows becomes the generation's."""
    options = _generate(
        stream=False,
        logprobs=True,
        top_logprobs=3,
        options={
            "temperature": 0,
            "top_p": 0.5,
            "top_k": 7,
            "min_p": 0.1,
            "num_predict": 9,
            "stop": ["a", "b"],
            "seed": 3,
            "repeat_penalty": 1.2,
            "repeat_last_n": -1,
            "presence_penalty": 0.5,
            "frequency_penalty": 0.25,
            "num_ctx": 4096,
            "num_gpu": 1,
            "use_mmap": True,
        },
    ).generation()
    sampling = options.sampling
    assert not options.stream
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (
        0,
        0.5,
        7,
        0.1,
    )
    assert (options.max_tokens, options.stop, options.seed) == (9, ("a", "b"), 3)
    assert sampling.repetition_penalty == 1.2
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, 0.25)
    assert sampling.top_logprobs == 3


@pytest.mark.parametrize(
    ("num_predict", "max_tokens"), [(0, None), (-1, WHOLE_ROOM), (-2, WHOLE_ROOM)]
)
def test_endless_completion_is_all_that_fits(num_predict: int, max_tokens: int | None) -> None:
    """Ollama's words for an endless completion ask for all that fits; -1 is no seed either."""
    options = _chat(options={"num_predict": num_predict, "seed": -1, "stop": "x"}).generation()
    assert options.max_tokens == max_tokens
    assert options.seed is None
    assert options.stop == ("x",)


def test_penalties_are_off_when_they_look_at_nothing() -> None:
    """``repeat_last_n: 0`` switches every penalty off, as in Ollama."""
    sampling = (
        _chat(options={"repeat_last_n": 0, "repeat_penalty": 1.5, "presence_penalty": 1})
        .generation()
        .sampling
    )
    assert (sampling.repetition_penalty, sampling.presence_penalty) == (1.0, 0.0)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"options": {"mirostat": 1}}, "options.mirostat"),
        ({"options": {"typical_p": 0.7}}, "options.typical_p"),
        ({"options": {"tfs_z": 2}}, "options.tfs_z"),
        ({"options": {"penalize_newline": False}}, "options.penalize_newline"),
        ({"options": {"repeat_last_n": 64, "repeat_penalty": 1.1}}, "options.repeat_last_n"),
        ({"suffix": "x"}, "suffix"),
        ({"context": [1]}, "context"),
        ({"template": "{{ .Prompt }}"}, "template"),
        ({"width": 512}, "width"),
        ({"debug_render_only": True}, "debug_render_only"),
    ],
)
def test_what_would_change_the_answer_is_refused_by_name(
    fields: dict[str, object], param: str
) -> None:
    """Nothing that would change an answer is dropped in silence."""
    with pytest.raises(UnsupportedParameterError) as refused:
        _generate(**fields)
    assert refused.value.param == param


@pytest.mark.parametrize(
    "fields",
    [
        {"keep_alive": -1},
        {"keep_alive": "5m"},
        {"truncate": True, "shift": False},
        {"images": [], "context": [], "suffix": "", "template": "", "format": ""},
        {"options": {"mirostat": 0, "typical_p": 1.0, "tfs_z": 1, "penalize_newline": True}},
        {"options": {"repeat_last_n": 64}},
        {"options": None, "format": None, "think": None, "stream": None},
    ],
)
def test_what_changes_nothing_is_accepted(fields: dict[str, object]) -> None:
    """Fields that ask for what is done anyway, and those about the loading of a model."""
    assert _generate(**fields).generation() == _generate().generation()
    assert _generate(**fields).constraint() is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"format": "xml"}, "format"),
        ({"format": 1}, "format"),
        ({"format": [{}]}, "format"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"raw": True, "system": "s"}, "system"),
        ({"raw": True, "think": True}, "think"),
        ({"options": {"num_predict": -3}}, "options.num_predict"),
        ({"options": {"temperature": 3}}, "options.temperature"),
        ({"options": {"seed": 2**63}}, "options.seed"),
        ({"options": {"stop": ["x"] * 1000}}, "options.stop"),
        ({"think": "hard"}, "think"),
        ({"options": []}, "options"),
    ],
)
def test_contradictions_and_wrong_values_name_their_field(
    fields: dict[str, object], param: str
) -> None:
    """A value out of its bounds, or of another kind, is refused."""
    with pytest.raises(InvalidRequestError) as refused:
        _generate(**fields)
    assert refused.value.param == param


def test_format_is_json_or_a_schema() -> None:
    """Both forms of ``format`` become the answer's constraint."""
    assert _chat(format="json").constraint() == Constraint(ConstraintKind.JSON_OBJECT, "", "format")
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    constraint = _chat(format=schema).constraint()
    assert constraint is not None
    assert constraint.kind is ConstraintKind.JSON_SCHEMA
    assert msgspec.json.decode(constraint.source) == schema


@pytest.mark.parametrize(
    ("think", "asked"),
    [
        (None, (None, {})),
        (True, (True, {})),
        (False, (False, {})),
        ("low", (True, {"reasoning_effort": "low"})),
        ("max", (True, {"reasoning_effort": "max"})),
    ],
)
def test_think_is_a_switch_or_an_effort(think: object, asked: object) -> None:
    """``think`` says whether to think, and as a word how much."""
    conversation = _conversation(*_HI, think=think)
    assert (conversation.thinks, conversation.template_variables) == asked


def test_a_round_of_tools_without_ids_is_put_together() -> None:
    """Results find the calls that they answer by the function's name, else in the order of calls."""
    call: dict[str, Any] = {"function": {"name": "f", "arguments": {"a": 1}}}
    other: dict[str, Any] = {"function": {"name": "g", "arguments": {}, "index": 1}}
    conversation = _conversation(
        *_HI,
        {"role": "assistant", "thinking": "hm", "tool_calls": [call, other]},
        {"role": "tool", "tool_name": "g", "content": "2"},
        {"role": "tool", "content": "1"},
    )
    _, said, second, first = conversation.messages
    assert said == {
        "role": "assistant",
        "content": "",
        "reasoning_content": "hm",
        "tool_calls": [
            {"id": "call_1_0", "type": "function", "function": call["function"]},
            {"id": "call_1_1", "type": "function", "function": {"name": "g", "arguments": {}}},
        ],
    }
    assert second == {"role": "tool", "content": "2", "tool_call_id": "call_1_1", "name": "g"}
    assert first == {"role": "tool", "content": "1", "tool_call_id": "call_1_0", "name": "f"}


def test_ids_of_calls_are_kept() -> None:
    """A client that keeps ids has them in the template."""
    call = {"id": "x", "type": "function", "function": {"name": "f", "arguments": {}}}
    conversation = _conversation(
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "x", "content": "1"},
    )
    said, result = conversation.messages
    assert said["tool_calls"] == [call]
    assert result == {"role": "tool", "content": "1", "tool_call_id": "x", "name": "f"}


def test_an_empty_list_of_images_is_no_image() -> None:
    """Clients send it with every message; the content stays a text."""
    for role in ("user", "system"):
        (message,) = _conversation({"role": role, "content": "look", "images": []}).messages
        assert message == {"role": role, "content": "look"}


def test_last_text_of_the_assistant_is_continued() -> None:
    """As in Ollama, an assistant's text at the end is a beginning; a call is not."""
    call = {"function": {"name": "f", "arguments": {}}}
    assert _conversation(*_HI, {"role": "assistant", "content": "It"}).continues_final_message
    assert not _conversation(*_HI, {"role": "assistant", "content": " "}).continues_final_message
    assert not _conversation(
        *_HI, {"role": "assistant", "content": "It", "tool_calls": [call]}
    ).continues_final_message


def test_prompt_follows_its_system_message() -> None:
    """``system`` stands before the prompt, which is a user's message."""
    assert _generate(system="be brief").conversation().messages == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hi"},
    ]
    assert _generate().conversation().messages == _HI


@pytest.mark.parametrize("type_", [OllamaChatRequest, OllamaGenerateRequest])
@pytest.mark.parametrize("hostile", HOSTILE_CHAT_BODIES, ids=lambda hostile: hostile[0])
def test_hostile_bodies_are_read_or_refused(
    type_: type[OllamaChatRequest | OllamaGenerateRequest], hostile: HostileBody
) -> None:
    """Whatever comes, decoding ends with a request or with an operating error, never with a bug."""
    with suppress(InvalidRequestError):
        body = decode_body(hostile[1], type_).checked()
        if isinstance(body, OllamaGenerateRequest) or body.messages:
            assert body.conversation().messages
