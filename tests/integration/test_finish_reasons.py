"""Why an answer ended is the same fact in every dialect, and what was cut inside a call is no content."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from support.clocks.polling import CEILING_S
from support.daemon.running_daemon import RunningDaemon
from support.engines.dialogue import sse_data, told
from support.engines.fake_engine import FakeEngine

_PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
_CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 12}}\n</tool_call>'
_TWICE = f"{_CALL}\n{_CALL}"
_BEGUN = len('<tool_call>\n{"name": "add", "arguments": {"a": ')
_SECOND = len(_CALL) + 1


@dataclass(frozen=True)
class Case:
    """A model's text, its cut, and the reason why the answer ends.

    Attributes:
        chat: The finish reason in chat completions.
        completion: The same in text completions, which know no calls.
        anthropic: The stop reason.
        calls: Arguments of the calls that the client gets, as text.
        content: The text that the client gets.
        is_forced: The choice of a tool is required.
    """

    said: str
    chat: str
    completion: str
    anthropic: str
    calls: list[str] = field(default_factory=list)
    content: str = ""
    max_tokens: int = 500
    stop: str | None = None
    is_parallel: bool = True
    is_forced: bool = False

    @property
    def is_incomplete(self) -> bool:
        """Return whether the answer ended before the model had ended it."""
        return self.chat == "length"


_WHOLE = '{"a": 12}'
_CASES = {
    "the end": Case("ab", "stop", "stop", "end_turn", content="ab"),
    "length": Case("abc", "length", "length", "max_tokens", content="ab", max_tokens=2),
    "a stop text": Case("abXXc", "stop", "stop", "stop_sequence", content="ab", stop="XX"),
    "calls": Case(_TWICE, "tool_calls", "stop", "tool_use", [_WHOLE, _WHOLE]),
    "one call": Case(_TWICE, "tool_calls", "stop", "tool_use", [_WHOLE], is_parallel=False),
    "a stop text behind a call": Case(
        f"{_CALL}abXXc", "tool_calls", "stop", "tool_use", [_WHOLE], "ab", stop="XX"
    ),
    "length in the first marker": Case(_TWICE, "length", "length", "max_tokens", max_tokens=6),
    "length in the first name": Case(_TWICE, "length", "length", "max_tokens", max_tokens=20),
    "length in the first arguments": Case(
        _TWICE, "length", "length", "max_tokens", ['{"a": '], max_tokens=_BEGUN
    ),
    "length behind a call": Case(
        _TWICE, "length", "length", "max_tokens", [_WHOLE], max_tokens=_SECOND
    ),
    "length in the second marker": Case(
        _TWICE, "length", "length", "max_tokens", [_WHOLE], max_tokens=_SECOND + 6
    ),
    "length in the second name": Case(
        _TWICE, "length", "length", "max_tokens", [_WHOLE], max_tokens=_SECOND + 16
    ),
    "length in the second arguments": Case(
        _TWICE, "length", "length", "max_tokens", [_WHOLE, '{"a": '], max_tokens=_SECOND + _BEGUN
    ),
    "a stop text in the second name": Case(
        f'{_CALL}<tool_call>{{"name": "aXX',
        "tool_calls",
        "stop",
        "tool_use",
        [_WHOLE],
        stop="XX",
    ),
    "a stop text in the second arguments": Case(
        f'{_CALL}<tool_call>{{"name": "add", "arguments": {{"a": XX',
        "stop",
        "stop",
        "stop_sequence",
        [_WHOLE, '{"a": '],
        stop="XX",
    ),
}
_FORCED = {
    f"{name}, forced": Case(**{**vars(_CASES[name]), "is_forced": True})
    for name in (
        "calls",
        "length in the first marker",
        "length in the first name",
        "length in the first arguments",
        "length behind a call",
        "length in the second marker",
        "length in the second name",
        "length in the second arguments",
    )
}
_ALL = {**_CASES, **_FORCED}


@dataclass(frozen=True)
class Ended:
    """An answer as a client has it at the end."""

    reason: object
    content: str
    calls: list[str]


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    """A client of a daemon whose model says what it is told."""
    with (
        RunningDaemon(lambda: FakeEngine(told)) as daemon,
        httpx.Client(base_url=daemon.url, timeout=CEILING_S) as client,
    ):
        yield client


def _chat_body(case: Case, **fields: object) -> dict[str, object]:
    function = {"name": "add", "parameters": _PARAMETERS}
    return {
        "model": "fake",
        "messages": [{"role": "user", "content": f"say {case.said}"}],
        "max_tokens": case.max_tokens,
        "tools": [{"type": "function", "function": function}],
        "tool_choice": "required" if case.is_forced else "auto",
        "parallel_tool_calls": case.is_parallel,
        **({} if case.stop is None else {"stop": case.stop}),
        **fields,
    }


def _chat(http: httpx.Client, case: Case) -> Ended:
    answer = http.post("/v1/chat/completions", json=_chat_body(case)).json()
    (choice,) = answer["choices"]
    calls = [one["function"]["arguments"] for one in choice["message"].get("tool_calls", [])]
    return Ended(choice["finish_reason"], choice["message"]["content"] or "", calls)


def _chat_stream(http: httpx.Client, case: Case) -> Ended:
    answer = http.post("/v1/chat/completions", json=_chat_body(case, stream=True))
    content, calls, reason = "", list[str](), None
    for event in sse_data(answer.content):
        for choice in event["choices"]:
            content += choice["delta"].get("content") or ""
            for call in choice["delta"].get("tool_calls", []):
                calls += [""] if "id" in call else []
                calls[call["index"]] += call["function"]["arguments"]
            reason = choice["finish_reason"]
    return Ended(reason, content, calls)


def _responses_body(case: Case, **fields: object) -> dict[str, object]:
    return {
        "model": "fake",
        "input": f"say {case.said}",
        "max_output_tokens": case.max_tokens,
        "tools": [{"type": "function", "name": "add", "parameters": _PARAMETERS}],
        "tool_choice": "required" if case.is_forced else "auto",
        "parallel_tool_calls": case.is_parallel,
        **({} if case.stop is None else {"stop": case.stop}),
        **fields,
    }


def _response(response: dict[str, Any]) -> Ended:
    content, calls = "", []
    for item in response["output"]:
        if item["type"] == "function_call":
            calls.append(item["arguments"])
            is_whole = item["arguments"] == _WHOLE
            assert item["status"] == ("completed" if is_whole else "incomplete")
        else:
            content += "".join(part["text"] for part in item["content"])
    return Ended((response["status"], response["incomplete_details"]), content, calls)


def _responses(http: httpx.Client, case: Case) -> Ended:
    return _response(http.post("/v1/responses", json=_responses_body(case)).json())


def _responses_stream(http: httpx.Client, case: Case) -> Ended:
    answer = http.post("/v1/responses", json=_responses_body(case, stream=True))
    events = _events(answer.content)
    assert events[-1]["type"] == f"response.{events[-1]['response']['status']}"
    told_text = "".join(
        one["delta"] for one in events if one["type"] == "response.output_text.delta"
    )
    ended = _response(events[-1]["response"])
    assert ended.content == told_text
    return ended


def _messages_body(case: Case, **fields: object) -> dict[str, object]:
    choice = {"type": "any" if case.is_forced else "auto"}
    return {
        "model": "fake",
        "messages": [{"role": "user", "content": f"say {case.said}"}],
        "max_tokens": case.max_tokens,
        "tools": [{"name": "add", "input_schema": _PARAMETERS}],
        "tool_choice": {**choice, "disable_parallel_tool_use": not case.is_parallel},
        **({} if case.stop is None else {"stop_sequences": [case.stop]}),
        **fields,
    }


def _messages(http: httpx.Client, case: Case) -> Ended:
    answer = http.post("/v1/messages", json=_messages_body(case)).json()
    blocks = answer["content"]
    assert answer["stop_sequence"] == (
        case.stop if answer["stop_reason"] == "stop_sequence" else None
    )
    # Arguments that were cut short are no JSON; a whole message has an empty object for them.
    inputs = [json.dumps(one["input"]) for one in blocks if one["type"] == "tool_use"]
    cut = [told or "{}" for told in case.calls if told != _WHOLE]
    calls = [one if one != "{}" else cut.pop() for one in inputs]
    content = "".join(one["text"] for one in blocks if one["type"] == "text")
    return Ended(answer["stop_reason"], content, calls)


def _messages_stream(http: httpx.Client, case: Case) -> Ended:
    answer = http.post("/v1/messages", json=_messages_body(case, stream=True))
    content, calls, reason = "", list[str](), None
    for event in _events(answer.content):
        match event:
            case {"content_block": {"type": "tool_use"}}:
                calls.append("")
            case {"delta": {"partial_json": text}}:
                calls[-1] += text
            case {"delta": {"text": text}}:
                content += text
            case {"delta": {"stop_reason": stop_reason}}:
                reason = stop_reason
            case _:
                pass
    return Ended(reason, content, calls)


def _events(body: bytes) -> list[dict[str, Any]]:
    lines = body.decode().splitlines()
    return [json.loads(one.removeprefix("data: ")) for one in lines if one.startswith("data: ")]


@pytest.mark.parametrize("ask", [_chat, _chat_stream])
@pytest.mark.parametrize("name", _ALL)
def test_chat_says_why_an_answer_ended(
    http: httpx.Client, name: str, ask: Callable[[httpx.Client, Case], Ended]
) -> None:
    """The finish reason of chat completions, whole and streamed, with the calls and the text."""
    case = _ALL[name]
    assert ask(http, case) == Ended(case.chat, case.content, case.calls)


@pytest.mark.parametrize("ask", [_responses, _responses_stream])
@pytest.mark.parametrize("name", _ALL)
def test_responses_say_why_an_answer_ended(
    http: httpx.Client, name: str, ask: Callable[[httpx.Client, Case], Ended]
) -> None:
    """A response is incomplete exactly where chat says ``length``; a call without its end is, too."""
    case = _ALL[name]
    reason = (
        ("incomplete", {"reason": "max_output_tokens"})
        if case.is_incomplete
        else ("completed", None)
    )
    assert ask(http, case) == Ended(reason, case.content, case.calls)


@pytest.mark.parametrize("ask", [_messages, _messages_stream])
@pytest.mark.parametrize("name", _ALL)
def test_messages_say_why_an_answer_ended(
    http: httpx.Client, name: str, ask: Callable[[httpx.Client, Case], Ended]
) -> None:
    """``max_tokens`` exactly where chat says ``length``, ``tool_use`` where it says ``tool_calls``."""
    case = _ALL[name]
    assert ask(http, case) == Ended(case.anthropic, case.content, case.calls)


@pytest.mark.parametrize("name", _CASES)
@pytest.mark.parametrize("stream", [False, True])
def test_completions_say_why_a_text_ended(
    http: httpx.Client,
    name: str,
    stream: bool,  # noqa: FBT001
) -> None:
    """Text completions know no calls: ``length`` where the text was cut by it, else ``stop``."""
    case = _CASES[name]
    body = {
        "model": "fake",
        "prompt": f"say {case.said}",
        "max_tokens": case.max_tokens,
        "stop": case.stop,
        "stream": stream,
    }
    answer = http.post("/v1/completions", json=body)
    choices = (
        [one for event in sse_data(answer.content) for one in event["choices"]]
        if stream
        else answer.json()["choices"]
    )
    assert choices[-1]["finish_reason"] == case.completion
    assert (
        "".join(one["text"] for one in choices)
        == case.said[: case.max_tokens].partition(case.stop or "\0")[0]
    )
