"""Responses through OpenAI's own client: whole, streamed, chained, with tools, and forgotten."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types.responses import (
    FunctionToolParam,
    Response,
    ResponseCustomToolCall,
    ResponseFunctionToolCall,
    ResponseReasoningItem,
)
from pydantic import BaseModel
from support.clocks.polling import CEILING_S
from support.daemon.running_daemon import RunningDaemon
from support.daemon.scraping import scrape
from support.engines.fake_engine import FakeEngine, FakeFaults, spelled

from machd.request.generation import SamplingParams

_PATH = "/v1/responses"
_KEYS = {"alice": "alice-0123456789abcdef", "bob": "bob-0123456789abcdef"}
_ADD: FunctionToolParam = {
    "type": "function",
    "name": "add",
    "description": "Adds.",
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    },
    "strict": True,
}


def _told(prompt: tuple[int, ...], sampling: SamplingParams, position: int) -> int:
    """Says what the last ``say`` of the conversation asks for, up to the end of its line."""
    text = bytes(prompt).decode().rpartition("say ")[2].partition("\n")[0]
    return spelled(text)(prompt, sampling, position)


@pytest.fixture(scope="module")
def daemon() -> Iterator[RunningDaemon]:
    """One daemon for the module, which keeps few responses."""
    with RunningDaemon(lambda: FakeEngine(_told), {"limits.max_stored_responses": 8}) as running:
        yield running


@pytest.fixture(scope="module")
def client(daemon: RunningDaemon) -> Iterator[OpenAI]:
    """OpenAI's client, which never tries again."""
    with _client(daemon) as opened:
        yield opened


def _client(daemon: RunningDaemon, key: str = "none") -> OpenAI:
    return OpenAI(base_url=f"{daemon.url}/v1", api_key=key, max_retries=0, timeout=CEILING_S)


def _post(daemon: RunningDaemon, **fields: object) -> httpx.Response:
    return httpx.post(daemon.url + _PATH, json={"model": "fake", "input": "say x", **fields})


@pytest.mark.parametrize("text", ["hello", "", "Größe 寿司 🍣", 'tab\tquote"back\\slash\u2028end'])
def test_a_stream_ends_with_the_whole_answer(client: OpenAI, text: str) -> None:
    """Text, status and usage do not depend on ``stream``; deltas add up to the text."""
    whole = client.responses.create(model="fake", input=f"say {text}")
    assert whole.output_text == text
    assert whole.status == "completed"
    assert whole.id.startswith("resp_")
    with client.responses.stream(model="fake", input=f"say {text}") as stream:
        events = list(stream)
        last = stream.get_final_response()
    assert last.output_text == text
    assert last.usage == whole.usage
    deltas = [one.delta for one in events if one.type == "response.output_text.delta"]
    assert "".join(deltas) == text
    numbers = [one.sequence_number for one in events]
    assert numbers == list(range(len(events)))


async def test_the_asynchronous_client_reads_the_same(daemon: RunningDaemon) -> None:
    """``AsyncOpenAI`` streams to the same end."""
    async with (
        AsyncOpenAI(
            base_url=f"{daemon.url}/v1", api_key="none", max_retries=0, timeout=CEILING_S
        ) as client,
        client.responses.stream(model="fake", input="say hello") as stream,
    ):
        types = [event.type async for event in stream]
        last = await stream.get_final_response()
    assert last.output_text == "hello"
    assert types[0] == "response.created"
    assert types[-1] == "response.completed"


def test_instructions_and_items_reach_the_template(client: OpenAI) -> None:
    """The operator's instructions come first; every role and part is rendered."""
    answer = client.responses.create(
        model="fake",
        instructions="be brief",
        input=[
            {"role": "developer", "content": "and kind"},
            {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
            {"role": "assistant", "content": "c"},
            {"type": "message", "role": "user", "content": "say yes"},
        ],
    )
    rendered = "system: be brief\n\nand kind\nuser: a\nassistant: c\nuser: say yes\nassistant: "
    assert answer.output_text == "yes"
    assert answer.usage is not None
    assert answer.usage.input_tokens == len(rendered)
    assert answer.usage.output_tokens == len("yes") + 1


def test_max_output_tokens_leave_it_incomplete(client: OpenAI) -> None:
    """The reason is told, streamed and not."""
    whole = client.responses.create(model="fake", input="say hello", max_output_tokens=2)
    assert (whole.status, whole.output_text) == ("incomplete", "he")
    assert whole.incomplete_details is not None
    assert whole.incomplete_details.reason == "max_output_tokens"
    stream = client.responses.create(
        model="fake", input="say hello", max_output_tokens=2, stream=True
    )
    assert [event.type for event in stream][-1] == "response.incomplete"


def test_a_chain_remembers_what_was_said(client: OpenAI) -> None:
    """Each response continues the one that it names, streamed or not; instructions do not stay."""
    first = client.responses.create(model="fake", instructions="be", input="say one")
    with client.responses.stream(
        model="fake", input="say two", previous_response_id=first.id
    ) as stream:
        second = stream.get_final_response()
    third = client.responses.create(model="fake", input="say three", previous_response_id=second.id)
    rendered = (
        "user: say one\nassistant: one\nuser: say two\nassistant: two\nuser: say three\nassistant: "
    )
    assert third.output_text == "three"
    assert third.previous_response_id == second.id
    assert third.usage is not None
    assert third.usage.input_tokens == len(rendered)
    client.responses.delete(second.id)
    again = client.responses.create(model="fake", input="say x", previous_response_id=third.id)
    assert again.output_text == "x"


def test_what_is_stored_can_be_read_and_forgotten(client: OpenAI, daemon: RunningDaemon) -> None:
    """GET gives the answer as it was; after DELETE, and for any other id, there is 404."""
    made = client.responses.create(model="fake", input="say hello", metadata={"k": "v"})
    assert client.responses.retrieve(made.id) == made
    deleted = httpx.delete(f"{daemon.url}{_PATH}/{made.id}")
    assert deleted.json() == {"id": made.id, "object": "response", "deleted": True}
    for again in (client.responses.retrieve, client.responses.delete):
        with pytest.raises(openai.NotFoundError):
            again(made.id)
    streamed = httpx.get(f"{daemon.url}{_PATH}/{made.id}", params={"stream": "true"})
    assert streamed.status_code == 400
    assert streamed.json()["error"]["param"] == "stream"


def test_what_is_not_stored_cannot_be_continued(client: OpenAI) -> None:
    """``store: false`` keeps nothing; the refusal names the field and not the id."""
    made = client.responses.create(model="fake", input="say x", store=False)
    assert made.model_extra is not None
    assert made.model_extra["store"] is False
    for previous in (made.id, "resp_secret"):
        with pytest.raises(openai.NotFoundError) as caught:
            client.responses.create(model="fake", input="x", previous_response_id=previous)
        assert caught.value.param == "previous_response_id"
        assert previous not in caught.value.message


def test_the_oldest_response_makes_room(client: OpenAI) -> None:
    """limits.max_stored_responses holds: the first of nine is gone, the others are there."""
    made = [client.responses.create(model="fake", input="say x").id for _ in range(9)]
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made[0])
    assert [client.responses.retrieve(one).id for one in made[1:]] == made[1:]


def test_references_stand_for_stored_items(client: OpenAI) -> None:
    """An item of an earlier response goes by its id, with or without naming the response."""
    first = client.responses.create(model="fake", input="say one")
    answer = client.responses.create(
        model="fake",
        input=[
            {"role": "user", "content": "q"},
            {"type": "item_reference", "id": first.output[0].id or ""},
            {"role": "user", "content": "say two"},
        ],
    )
    assert answer.usage is not None
    assert answer.usage.input_tokens == len("user: q\nassistant: one\nuser: say two\nassistant: ")
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model="fake", input=[{"type": "item_reference", "id": "msg_none"}])
    assert caught.value.param == "input[0].id"


def test_thoughts_are_an_item_and_can_be_sent_back(client: OpenAI) -> None:
    """``<think>`` becomes a reasoning item, streamed and whole; a client may return it."""
    order = "say <think>hm</think>so"
    whole = client.responses.create(model="fake", input=order)
    thoughts = whole.output[0]
    assert isinstance(thoughts, ResponseReasoningItem)
    assert thoughts.content is not None
    assert thoughts.content[0].text == "hm"
    assert whole.output_text == "so"
    stream = client.responses.create(model="fake", input=order, stream=True)
    said = [event.delta for event in stream if event.type == "response.reasoning_text.delta"]
    assert "".join(said) == "hm"
    items: Any = [{"role": "user", "content": order}, *whole.output]
    items.append({"role": "user", "content": "say ok"})
    assert client.responses.create(model="fake", input=items).output_text == "ok"


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_goes_round(client: OpenAI, stream: bool) -> None:  # noqa: FBT001
    """The model calls, the client answers by the call's id, and the model goes on."""
    order = 'say <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    first: Response
    if stream:
        with client.responses.stream(model="fake", input=order, tools=[_ADD]) as events:
            types = [event.type for event in events]
            first = events.get_final_response()
        assert "response.function_call_arguments.done" in types
    else:
        first = client.responses.create(model="fake", input=order, tools=[_ADD])
    [call] = first.output
    assert isinstance(call, ResponseFunctionToolCall)
    assert (call.name, json.loads(call.arguments), call.status) == ("add", {"a": 1}, "completed")
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(
            model="fake", input="say x", tools=[_ADD], previous_response_id=first.id
        )
    assert caught.value.param == "input"
    second = client.responses.create(
        model="fake",
        tools=[_ADD],
        previous_response_id=first.id,
        input=[
            {"type": "function_call_output", "call_id": call.call_id, "output": "2"},
            {"role": "user", "content": "say done"},
        ],
    )
    assert second.output_text == "done"


_WRITTEN = '<tool_call>{"name": "add", "arguments": {"a": %d}}</tool_call>'


@pytest.mark.parametrize(
    "order",
    [
        f"{_WRITTEN % 1}and{_WRITTEN % 2}",
        f"{_WRITTEN % 1}<think>hm</think>{_WRITTEN % 2}",
        f"{_WRITTEN % 1}and",
        f"so{_WRITTEN % 1}<think>hm</think>and{_WRITTEN % 2}then",
    ],
)
def test_whatever_stands_between_calls_can_be_continued(client: OpenAI, order: str) -> None:
    """With an output for every call: after the response's id, and after its items sent back."""
    asked: Any = {"role": "user", "content": f"say {order}"}
    first = client.responses.create(model="fake", input=[asked], tools=[_ADD])
    calls = [item for item in first.output if isinstance(item, ResponseFunctionToolCall)]
    assert len(calls) == order.count("<tool_call>")
    outputs: list[Any] = [
        {"type": "function_call_output", "call_id": call.call_id, "output": "2"} for call in calls
    ]
    outputs.append({"role": "user", "content": "say done"})
    by_id = client.responses.create(
        model="fake", tools=[_ADD], previous_response_id=first.id, input=outputs
    )
    whole: Any = [asked, *first.output, *outputs]
    by_items = client.responses.create(model="fake", tools=[_ADD], input=whole)
    assert by_id.output_text == by_items.output_text == "done"
    assert by_id.usage is not None
    assert by_items.usage is not None
    assert by_id.usage.input_tokens == by_items.usage.input_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_a_custom_tool_goes_round(client: OpenAI, stream: bool) -> None:  # noqa: FBT001
    """Its call is an item of its own kind with the text alone, beside tools that are left out."""
    order = r'say <tool_call>{"name": "patch", "arguments": {"input": "+ a\n"}}</tool_call>'
    tools: list[Any] = [
        {"type": "custom", "name": "patch", "format": {"type": "text"}},
        {"type": "web_search", "external_web_access": False},
    ]
    first: Response
    if stream:
        with client.responses.stream(model="fake", input=order, tools=tools) as events:
            types = [event.type for event in events]
            first = events.get_final_response()
        assert "response.custom_tool_call_input.done" in types
    else:
        first = client.responses.create(model="fake", input=order, tools=tools)
    [call] = first.output
    assert isinstance(call, ResponseCustomToolCall)
    assert (call.name, call.input) == ("patch", "+ a\n")
    said: list[Any] = [
        {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "ok"},
        {"role": "user", "content": "say done"},
    ]
    second = client.responses.create(
        model="fake", tools=tools, previous_response_id=first.id, input=said
    )
    assert second.output_text == "done"
    asked: Any = [{"role": "user", "content": order}, *first.output, *said]
    again = client.responses.create(model="fake", tools=tools, input=asked)
    assert again.output_text == "done"


@pytest.mark.parametrize("stream", [False, True])
def test_tools_that_are_left_out_are_named_in_a_header(client: OpenAI, stream: bool) -> None:  # noqa: FBT001
    """Their types, each once; without any there is no header."""
    tools: list[Any] = [
        {"type": "web_search"},
        {"type": "function", "name": "f", "parameters": {}},
        {"type": "local_shell"},
        {"type": "web_search", "external_web_access": False},
    ]
    for given, named in ((tools, "local_shell, web_search"), (tools[1:2], None)):
        answer = client.responses.with_raw_response.create(
            model="fake", input="say hi", tools=given, stream=stream
        )
        assert answer.headers.get("x-dropped-tools") == named


@pytest.mark.parametrize(
    ("asked", "status"), [(1, 200), (7, 200), (None, 200), (0, 400), ("1", 400)]
)
def test_a_number_of_tool_calls_is_kept_to(client: OpenAI, asked: object, status: int) -> None:
    """It counts tools that a server runs itself; machd runs none, and says the number back."""
    body = {"model": "fake", "input": "say hi", "max_tool_calls": asked}
    answer = client._client.post(f"{client.base_url}responses", json=body)
    assert answer.status_code == status
    if status == 200:
        assert answer.json()["max_tool_calls"] == asked


def test_no_input_is_an_input(client: OpenAI) -> None:
    """With instructions, after a response, and alone, as agents probe a server."""
    first = client.responses.create(model="fake", input=[], instructions="say one")
    assert first.output_text == "one"
    assert client.responses.create(model="fake", input=[], previous_response_id=first.id).usage
    assert client.responses.create(model="fake", input=[]).status == "completed"


def test_thoughts_are_counted(client: OpenAI) -> None:
    """Their tokens are part of the output's."""
    usage = client.responses.create(model="fake", input="say <think>hm</think>so").usage
    assert usage is not None
    assert 0 < usage.output_tokens_details.reasoning_tokens < usage.output_tokens


def test_a_schema_shapes_the_answer(client: OpenAI) -> None:
    """``responses.parse`` gets an object of its type whatever the model would have said."""

    class Sum(BaseModel):
        total: int

    order = 'say {"total": 3} and a word more'
    answer = client.responses.parse(model="fake", input=order, text_format=Sum)
    assert answer.output_parsed == Sum(total=3)
    assert answer.output_text == '{"total": 3}'
    refused = {"type": "json_schema", "name": "n", "schema": {"$ref": "#/nowhere"}}
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model="fake", input="x", extra_body={"text": {"format": refused}})
    assert caught.value.param == "text.format.schema"


def test_a_failure_inside_a_stream_is_told() -> None:
    """``response.failed`` ends it, and nothing is stored."""
    faults = FakeFaults(row_errors={(0, 3): RuntimeError("row")})
    with (
        RunningDaemon(lambda: FakeEngine(_told, faults=faults)) as running,
        _client(running) as client,
    ):
        events = list(client.responses.create(model="fake", input="say hello", stream=True))
        assert events[-1].type == "response.failed"
        assert events[-1].response.error is not None
        assert events[-1].response.error.code == "server_error"
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(events[-1].response.id)
        assert scrape(running.url, "machd_requests_total", endpoint="responses") == 1


def test_keys_do_not_see_each_other(tmp_path: Path) -> None:
    """Another key's response can neither be read, nor continued, nor referred to, nor deleted."""
    keys = tmp_path / "keys"
    keys.write_text("".join(f"{name}:{key}\n" for name, key in _KEYS.items()))
    with (
        RunningDaemon(lambda: FakeEngine(_told), {"auth.api_keys_file": str(keys)}) as running,
        _client(running, _KEYS["alice"]) as alice,
        _client(running, _KEYS["bob"]) as bob,
        _client(running, "wrong") as stranger,
    ):
        made = alice.responses.create(model="fake", input="say x")
        item_id = made.output[0].id or ""
        for refused in (
            lambda: bob.responses.retrieve(made.id),
            lambda: bob.responses.delete(made.id),
            lambda: bob.responses.create(model="fake", input="x", previous_response_id=made.id),
        ):
            with pytest.raises(openai.NotFoundError):
                refused()
        with pytest.raises(openai.BadRequestError):
            bob.responses.create(model="fake", input=[{"type": "item_reference", "id": item_id}])
        for call in (stranger.responses.retrieve, stranger.responses.delete):
            with pytest.raises(openai.AuthenticationError):
                call(made.id)
        assert alice.responses.retrieve(made.id) == made


_DEEP = 100_000
_LONG: dict[str, dict[str, object]] = {
    "10000 items": {"input": [{"role": "user", "content": "x"}] * 10_000},
    "10000 parts": {
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "x"}] * 10_000}]
    },
    "8000 references": {"input": [{"type": "item_reference", "id": "x"}] * 8_000},
    "8000 calls": {
        "input": [
            {"type": "function_call", "call_id": f"{one}", "name": "f", "arguments": "{}"}
            for one in range(8_000)
        ]
    },
    "1000 tools": {"tools": [{"type": "function", "name": f"f{i}"} for i in range(1000)]},
    "a schema that refers to nothing": {
        "text": {"format": {"type": "json_schema", "name": "n", "schema": {"$ref": "#/x"}}}
    },
    "an id of 10000 characters": {"previous_response_id": "x" * 10_000},
    "a number as input": {"input": 1},
    "an unknown role": {"input": [{"role": "root", "content": "x"}]},
    "a template": {"chat_template": "{{ 1 }}"},
    "8000 words of the operator": {"input": [{"role": "system", "content": "x" * 150}] * 8_000},
    "8000 thoughts, and a call without an output": {
        "input": [
            *[{"type": "reasoning", "content": [{"type": "reasoning_text", "text": "x" * 100}]}]
            * 8_000,
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        ]
    },
}
_HOSTILE: list[tuple[str, bytes]] = [
    ("empty", b""),
    ("not JSON", b"{"),
    ("a list", b"[]"),
    ("deep input", b'{"model":"fake","input":' + b"[" * _DEEP + b"]" * _DEEP + b"}"),
    (
        "deep parameters",
        b'{"model":"fake","input":"x","tools":[{"type":"function","name":"f","parameters":'
        + b'{"a":' * _DEEP
        + b"1"
        + b"}" * _DEEP
        + b"}]}",
    ),
    (
        "deep schema",
        b'{"model":"fake","input":"x","text":{"format":{"type":"json_schema","name":"n","schema":'
        + b'{"a":' * _DEEP
        + b"1"
        + b"}" * _DEEP
        + b"}}}",
    ),
    *(
        (name, json.dumps({"model": "fake", "input": "x", **fields}).encode())
        for name, fields in _LONG.items()
    ),
]


@pytest.mark.parametrize("body", [pytest.param(body, id=name) for name, body in _HOSTILE])
def test_hostile_body_is_refused(daemon: RunningDaemon, body: bytes) -> None:
    """A hostile body gets a short 400 in the envelope, and the next request is served."""
    answer = httpx.post(
        daemon.url + _PATH, content=body, headers={"Content-Type": "application/json"}
    )
    assert answer.status_code == 400
    assert answer.json()["error"].keys() == {"message", "type", "param", "code"}
    assert len(answer.content) < 2000
    assert _post(daemon).status_code == 200
