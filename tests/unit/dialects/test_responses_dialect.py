"""A response's events are OpenAI's, in order, and add up to the whole answer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai import omit
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import Response as OpenAIResponse
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter
from support.daemon.serving_parts import identity_of

from machd.clock import SystemClock
from machd.dialects.responses.answer import OutputItem
from machd.dialects.responses.request import ResponsesRequest
from machd.dialects.responses.stream import ResponsesDialect, opened_response
from machd.dialects.wire.decoding import decode_body
from machd.engine.fake.tokenizer import FakeTokenizer
from machd.engine.protocol.step import SampledToken, TokenLogprob
from machd.errors import (
    DrainDeadlineError,
    GrammarError,
    MachdError,
    QueueTimeoutError,
    RowFaultError,
)
from machd.generations.choice import ChoiceDelta
from machd.generations.generation import GenerationUsage
from machd.reading.output import (
    Content,
    OutputPiece,
    Reasoning,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)

_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
_USAGE = GenerationUsage(prompt_tokens=5, cached_tokens=2, completion_tokens=3, reasoning_tokens=1)

_CALL = (
    ToolCallStart(0, "call_a", "add"),
    ToolCallArguments(0, '{"a"'),
    ToolCallArguments(0, ": 1}"),
    ToolCallEnd(0),
)
_TEXT_EVENTS = [
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
]
_THOUGHT_EVENTS = [name.replace("output_text", "reasoning_text") for name in _TEXT_EVENTS]
_CALL_EVENTS = [
    "response.output_item.added",
    "response.function_call_arguments.delta",
    "response.function_call_arguments.done",
    "response.output_item.done",
]


class _Written:
    """One response, written by a dialect of its own."""

    def __init__(self, **fields: object) -> None:
        body = decode_body(
            json.dumps({"model": "m", "input": "hi", **fields}, indent=1).encode(), ResponsesRequest
        ).checked()
        options = body.options()
        self.kept: list[tuple[bytes, Sequence[OutputItem]]] = []
        self.dialect = ResponsesDialect(
            opened_response(body, options, identity_of("resp_1"), "m"),
            logprobs_from=FakeTokenizer() if options.sampling.top_logprobs is not None else None,
            clock=SystemClock(),
            keep=lambda answer, items: self.kept.append((answer, items)),
        )

    def stream(self, *deltas: ChoiceDelta) -> list[dict[str, Any]]:
        frames = self.dialect.opening(_USAGE)
        frames += b"".join(self.dialect.push(delta) for delta in deltas)
        return _events(frames + self.dialect.closing(_USAGE))

    def whole(self, *deltas: ChoiceDelta) -> dict[str, Any]:
        for delta in deltas:
            self.dialect.push(delta)
        answer: dict[str, Any] = json.loads(self.dialect.finish(_USAGE))
        return answer


def _events(frames: bytes) -> list[dict[str, Any]]:
    """The events' data, after a strict look at frames, names, numbers and shapes."""
    assert b"\r" not in frames
    *blocks, rest = frames.split(b"\n\n")
    assert rest == b""
    events = []
    for number, block in enumerate(blocks):
        name, data = block.split(b"\n")
        event = json.loads(data.removeprefix(b"data: "))
        assert name == f"event: {event['type']}".encode()
        assert event["sequence_number"] == number
        seen = _EVENT.validate_python(event, strict=True)
        assert seen.type == event["type"]
        assert seen.model_extra == {}
        events.append(event)
    return events


def _delta(*pieces: OutputPiece, end: str | None = None, tokens: str = "") -> ChoiceDelta:
    sampled = tuple(
        SampledToken(0, byte, -0.5, (TokenLogprob(byte, -0.5),)) for byte in tokens.encode()
    )
    return ChoiceDelta(0, "", sampled, end, pieces)


def _types(events: Sequence[dict[str, Any]]) -> list[str]:
    return [event["type"] for event in events]


def _without_ids(output: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in item.items() if key != "id"} for item in output]


def test_a_text_comes_in_openais_order() -> None:
    """Created, in progress, the item with its part, and the whole response at the end."""
    events = _Written().stream(_delta(Content("he")), _delta(Content("llo"), end="stop"))
    assert _types(events) == [
        "response.created",
        "response.in_progress",
        *_TEXT_EVENTS[:3],
        "response.output_text.delta",
        *_TEXT_EVENTS[3:],
        "response.completed",
    ]
    assert [one["response"]["status"] for one in events[:2]] == ["in_progress"] * 2
    assert events[0]["response"]["output"] == []
    assert events[-4]["text"] == "hello"
    last = events[-1]["response"]
    assert last["status"] == "completed"
    assert last["output"] == [events[-2]["item"]]
    assert last["usage"] == {
        "input_tokens": 5,
        "input_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 0},
        "output_tokens": 3,
        "output_tokens_details": {"reasoning_tokens": 1},
        "total_tokens": 8,
    }


def test_thoughts_text_and_calls_are_items() -> None:
    """Each with its own events, one after the other, numbered by ``output_index``."""
    second = (ToolCallStart(1, "call_b", "sub"), ToolCallArguments(1, "{}"), ToolCallEnd(1))
    events = _Written().stream(
        _delta(Reasoning("h"), Reasoning("m"), Content("so"), *_CALL, *second, end="tool_calls")
    )
    assert _types(events) == [
        "response.created",
        "response.in_progress",
        *_THOUGHT_EVENTS,
        *_TEXT_EVENTS,
        *_CALL_EVENTS,
        *_CALL_EVENTS,
        "response.completed",
    ]
    indices = [event["output_index"] for event in events if "output_index" in event]
    assert indices == sorted(indices)
    thoughts, text, call, other = events[-1]["response"]["output"]
    assert thoughts["id"].startswith("rs_")
    assert thoughts["content"] == [{"type": "reasoning_text", "text": "hm"}]
    assert thoughts["summary"] == []
    assert text["id"].startswith("msg_")
    assert text["content"][0]["text"] == "so"
    assert call["id"].startswith("fc_")
    assert (call["call_id"], call["name"], call["arguments"]) == ("call_a", "add", '{"a": 1}')
    assert (other["call_id"], other["arguments"]) == ("call_b", "{}")
    ids = {event["item_id"] for event in events if "item_id" in event}
    assert ids == {item["id"] for item in events[-1]["response"]["output"]}


_CUSTOM = {"type": "custom", "name": "add", "description": "+", "format": {"type": "text"}}


def test_a_custom_tools_call_is_an_item_of_its_own_kind() -> None:
    """Its input is the text out of the JSON, told when it is whole; functions stay functions."""
    call = (
        ToolCallStart(0, "call_a", "add"),
        ToolCallArguments(0, '{"input": "a'),
        ToolCallArguments(0, '\\n\\u00fc"}'),
        ToolCallEnd(0),
    )
    function = (ToolCallStart(1, "call_b", "sub"), ToolCallArguments(1, "{}"), ToolCallEnd(1))
    tools = [_CUSTOM, {"type": "function", "name": "sub"}, {"type": "web_search"}]
    deltas = [_delta(*call[:2]), _delta(*call[2:], *function, end="tool_calls")]
    events = _Written(tools=tools).stream(*deltas)
    assert _types(events)[2:-1] == [
        "response.output_item.added",
        "response.custom_tool_call_input.delta",
        "response.custom_tool_call_input.done",
        "response.output_item.done",
        *_CALL_EVENTS,
    ]
    assert (events[2]["item"]["input"], events[3]["delta"]) == ("", "a\nü")
    answer = _Written(tools=tools).whole(*deltas)
    item, other = answer["output"]
    assert item["id"].startswith("ctc_")
    assert (item["call_id"], item["name"], item["input"]) == ("call_a", "add", "a\nü")
    assert other["type"] == "function_call"
    assert _without_ids(events[-1]["response"]["output"]) == _without_ids(answer["output"])
    assert OpenAIResponse.model_validate(answer).output[0].type == "custom_tool_call"


def test_only_tools_that_are_served_are_given_back() -> None:
    """In OpenAI's shapes; so are the choices that name a custom tool."""
    written: dict[str, Any] = {"tools": [{"type": "web_search"}, _CUSTOM]}
    for choice in (
        {"type": "custom", "name": "add"},
        {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "custom", "name": "add"}]},
    ):
        answer = _Written(**written, tool_choice=choice).whole(_delta(Content("x"), end="stop"))
        assert answer["tools"] == [_CUSTOM]
        assert answer["tool_choice"] == choice
        OpenAIResponse.model_validate(answer, strict=True)


@pytest.mark.parametrize(
    ("pieces", "item"),
    [
        ((Content("cut"),), {"status": "incomplete"}),
        ((Reasoning("cut"),), {"status": "incomplete"}),
        (_CALL[:2], {"status": "incomplete", "arguments": '{"a"'}),
        (_CALL, {"status": "completed"}),
    ],
)
def test_what_max_output_tokens_cut_short_is_incomplete(
    pieces: Sequence[OutputPiece], item: dict[str, str]
) -> None:
    """The response, with the reason, and the item that was open; items before it are whole."""
    events = _Written(max_output_tokens=3).stream(
        _delta(*pieces[:1]), _delta(*pieces[1:], end="length")
    )
    last = events[-1]
    assert last["type"] == "response.incomplete"
    assert last["response"]["status"] == "incomplete"
    assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert last["response"]["completed_at"] is None
    assert last["response"]["output"][-1].items() >= item.items()


def test_nothing_said_is_an_empty_message() -> None:
    """``output_text`` is there, and empty."""
    answer = _Written().whole(_delta(end="stop"))
    assert OpenAIResponse.model_validate(answer).output_text == ""
    assert len(answer["output"]) == 1


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RowFaultError("inside"), "server_error"),
        (DrainDeadlineError("stopped"), "server_error"),
        (QueueTimeoutError("late"), "rate_limit_exceeded"),
        (GrammarError("too complex"), "invalid_prompt"),
    ],
)
def test_a_failure_ends_the_stream(error: MachdError, code: str) -> None:
    """With the finished items, an error of OpenAI's codes, and nothing stored."""
    written = _Written()
    frames = written.dialect.opening(_USAGE)
    frames += written.dialect.push(_delta(Reasoning("hm"), Content("so")))
    events = _events(frames + written.dialect.failure(error))
    assert events[-1]["type"] == "response.failed"
    response = events[-1]["response"]
    assert response["status"] == "failed"
    assert response["error"] == {"code": code, "message": error.message}
    assert [item["type"] for item in response["output"]] == ["reasoning"]
    assert response["usage"] is None
    assert written.kept == []


def test_the_request_is_given_back() -> None:
    """All that OpenAI's object repeats, on one line though the body had many."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    tool = {"type": "function", "name": "add", "description": "+", "parameters": schema}
    format_ = {"type": "json_schema", "name": "n", "schema": schema, "strict": True}
    fields: dict[str, Any] = {
        "instructions": "be\nbrief",
        "max_output_tokens": 9,
        "metadata": {"k": "v"},
        "parallel_tool_calls": False,
        "previous_response_id": "resp_0",
        "prompt_cache_key": "p",
        "safety_identifier": "s",
        "service_tier": "flex",
        "store": False,
        "temperature": 0.5,
        "top_logprobs": 2,
        "top_p": 0.25,
        "user": "u",
    }
    written = _Written(
        **fields,
        tools=[tool],
        tool_choice={"type": "function", "name": "add"},
        text={"format": format_},
        reasoning={"effort": "low", "summary": "auto"},
    )
    events = written.stream(_delta(Content("x"), end="stop"))
    for response in (events[0]["response"], events[-1]["response"]):
        assert {name: response[name] for name in fields} == fields
        assert response["tools"] == [{**tool, "strict": False}]
        assert response["tool_choice"] == {"type": "function", "name": "add"}
        assert response["text"] == {"format": {**format_, "description": None}}
        assert response["reasoning"] == {"effort": "low", "summary": "auto"}
        assert OpenAIResponse.model_validate(response, strict=True).model_extra == {
            "store": fields["store"]
        }


def test_allowed_tools_are_given_back() -> None:
    """In OpenAI's shape of that choice."""
    choice = {
        "type": "allowed_tools",
        "mode": "auto",
        "tools": [{"type": "function", "name": "add"}],
    }
    written = _Written(tools=[{"type": "function", "name": "add"}], tool_choice=choice)
    answer = written.whole(_delta(Content("x"), end="stop"))
    assert answer["tool_choice"] == choice
    OpenAIResponse.model_validate(answer, strict=True)


def test_logprobs_stand_with_the_text() -> None:
    """An entry a token, in the deltas and in the finished text, streamed and whole."""
    deltas = [
        _delta(Content("a"), tokens="a"),
        _delta(tokens="b"),
        _delta(Content("bc"), tokens="c"),
        _delta(end="stop", tokens="d"),
    ]
    events = _Written(top_logprobs=1).stream(*deltas)
    streamed = [
        entry["token"]
        for event in events
        if event["type"] == "response.output_text.delta"
        for entry in event["logprobs"]
    ]
    assert streamed == ["a", "b", "c", "d"]
    done = next(event for event in events if event["type"] == "response.output_text.done")
    answer = _Written(top_logprobs=1).whole(*deltas)
    assert answer["output"][0]["content"][0]["logprobs"] == done["logprobs"]
    assert done["logprobs"][0] == {
        "token": "a",
        "logprob": -0.5,
        "bytes": [97],
        "top_logprobs": [{"token": "a", "logprob": -0.5, "bytes": [97]}],
    }


def test_what_is_kept_is_what_was_answered() -> None:
    """Once, when all is finished: the very bytes of a whole answer, and those of a stream's last."""
    delta = _delta(Content("x"), *_CALL, end="tool_calls")
    whole = _Written()
    answer = whole.whole(delta)
    [(kept, items)] = whole.kept
    assert json.loads(kept) == answer
    assert [item.id for item in items] == [item["id"] for item in answer["output"]]
    streamed = _Written()
    events = streamed.stream(delta)
    [(kept, _)] = streamed.kept
    assert json.loads(kept) == events[-1]["response"]


_STRETCHES = st.lists(
    st.one_of(
        st.text(min_size=1, max_size=5).map(lambda text: (Reasoning(text),)),
        st.text(min_size=1, max_size=5).map(lambda text: (Content(text),)),
        st.just(_CALL),
    ),
    max_size=6,
)


@settings(max_examples=25, deadline=None)  # OpenAI's types take their time
@given(stretches=_STRETCHES, cut=st.integers(0, 12), end=st.sampled_from(["stop", "length"]))
def test_a_stream_adds_up_to_the_whole_answer(
    stretches: list[tuple[OutputPiece, ...]], cut: int, end: str
) -> None:
    """However the pieces fall into events: OpenAI's own accumulator ends with the same output."""
    pieces = [piece for stretch in stretches for piece in stretch]
    deltas = [_delta(*pieces[:cut]), _delta(*pieces[cut:], end=end)]
    events = _Written().stream(*deltas)
    whole = _Written().whole(*deltas)
    last = events[-1]["response"]
    assert _without_ids(last["output"]) == _without_ids(whole["output"])
    assert [event["item"] for event in events if event["type"].endswith("item.done")] == (
        last["output"]
    )
    state: ResponseStreamState[Any] = ResponseStreamState(input_tools=[], text_format=omit)
    for event in events:
        state.handle_event(_EVENT.validate_python(event))
    if end == "stop":
        completed = state._completed_response
        assert completed is not None
        assert completed.output_text == "".join(
            piece.text for piece in pieces if isinstance(piece, Content)
        )
