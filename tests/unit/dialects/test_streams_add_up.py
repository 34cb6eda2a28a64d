"""In every dialect, the frames of a stream add up to the unstreamed answer."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import Message, RawMessageStreamEvent
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.lib.streaming._deltas import accumulate_delta
from pydantic import TypeAdapter
from support.daemon.serving_parts import identity_of

from machd.clock import SystemClock
from machd.dialects.anthropic.stream import AnthropicDialect
from machd.dialects.chat.answer import ChatCompletionChunk
from machd.dialects.chat.handler import KeepingDialect, _ChatDialect
from machd.dialects.chat.request import ChatCompletionRequest
from machd.dialects.completions.answer import Completion
from machd.dialects.completions.handler import _CompletionDialect, _GrowingChoice
from machd.dialects.completions.request import CompletionRequest
from machd.dialects.infill import _InfillDialect
from machd.dialects.ollama.stream import OllamaChatDialect, OllamaDialect, OllamaGenerateDialect
from machd.dialects.responses.request import ResponsesRequest
from machd.dialects.responses.stream import ResponsesDialect, opened_response
from machd.dialects.wire.decoding import decode_body
from machd.engine.fake.tokenizer import FakeTokenizer
from machd.engine.protocol.step import PromptLogprob, SampledToken, ScoredPrompt, TokenLogprob
from machd.generations.choice import ChoiceDelta
from machd.generations.generation import GenerationTiming, GenerationUsage
from machd.http.pacing import merge_deltas
from machd.http.stream import Dialect
from machd.reading.output import (
    Content,
    OutputPiece,
    Reasoning,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)

_Wire = dict[str, Any]
_ANTHROPIC_EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
_TOKENIZER = FakeTokenizer()
_PROMPT = tuple(b"Hi")
_USAGE = GenerationUsage(
    prompt_tokens=7,
    cached_tokens=3,
    completion_tokens=11,
    reasoning_tokens=2,
    timing=GenerationTiming(0.1, 0.2, 0.3),
)


def _events(frames: bytes) -> list[_Wire]:
    """Data of server-sent events, ``[DONE]`` left out."""
    lines = frames.decode().split("\n")
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    return [json.loads(one) for one in data if one != "[DONE]"]


# --- what a client makes of a stream, in the shape of the unstreamed answer -----------------------


def _chat(frames: bytes) -> _Wire:
    answer: _Wire = {}
    choices: dict[int, _Wire] = {}
    for chunk in _events(frames):
        for one in chunk["choices"]:
            choice = choices.setdefault(one["index"], {"message": {}, "finish_reason": None})
            assert choice["finish_reason"] is None
            choice["message"] = accumulate_delta(choice["message"], one["delta"])
            choice["finish_reason"] = one["finish_reason"]
            choice.setdefault("logprobs", []).extend(
                (one["logprobs"] or {"content": []})["content"]
            )
        answer = chunk
    for choice in choices.values():
        message = choice["message"]
        for call in message.get("tool_calls", ()):
            del call["index"]
        if not message["content"] and ("tool_calls" in message or "function_call" in message):
            message["content"] = None
        message["refusal"] = None
    answer["choices"] = [{"index": index, **choices[index]} for index in sorted(choices)]
    return {**answer, "object": "chat.completion"}


def _chat_body(body: _Wire) -> _Wire:
    for choice in body["choices"]:
        choice["logprobs"] = (choice["logprobs"] or {"content": []})["content"]
    return body


def _completion(frames: bytes) -> _Wire:
    answer: _Wire = {}
    choices: dict[int, _Wire] = {}
    for chunk in _events(frames):
        for one in chunk["choices"]:
            choice = choices.setdefault(one["index"], {**one, "text": "", "logprobs": None})
            choice["text"] += one["text"]
            choice["finish_reason"] = one["finish_reason"]
            if (columns := one["logprobs"]) is not None:
                so_far = choice["logprobs"] or {name: [] for name in columns}
                choice["logprobs"] = {name: so_far[name] + columns[name] for name in columns}
        answer = chunk
    return {**answer, "choices": [choices[index] for index in sorted(choices)]}


def _ollama(frames: bytes) -> _Wire:
    lines = [json.loads(line) for line in frames.splitlines()]
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    answer: _Wire = lines[-1]
    if logprobs := [entry for line in lines for entry in line.get("logprobs", ())]:
        answer["logprobs"] = logprobs
    if "response" in answer:
        return _with_texts(answer, lines, "response", "thinking")
    messages = [line["message"] for line in lines]
    message = _with_texts(answer["message"], messages, "content", "thinking")
    if calls := [call for one in messages for call in one.get("tool_calls", ())]:
        message["tool_calls"] = calls
    return answer


def _with_texts(answer: _Wire, parts: Sequence[_Wire], *names: str) -> _Wire:
    for name in names:
        if any(name in one for one in parts):
            answer[name] = "".join(one.get(name, "") for one in parts)
    return answer


def _anthropic(frames: bytes) -> _Wire:
    snapshot: Any = None
    buffers: dict[int, bytes] = {}
    for event in _events(frames):
        if event["type"] != "ping":
            read = _ANTHROPIC_EVENT.validate_python(event, strict=True)
            snapshot = accumulate_event(event=read, current_snapshot=snapshot, json_bufs=buffers)
    seen: _Wire = snapshot.to_dict()
    # The client's own field for a refusal, of which machd has none.
    seen.pop("stop_details", None)
    return seen


def _anthropic_body(body: _Wire) -> _Wire:
    assert Message.model_validate(body, strict=True).model_extra == {}
    return body


def _responses(frames: bytes) -> _Wire:
    events = _events(frames)
    answer: _Wire = events[-1]["response"]
    assert [one["item"] for one in events if one["type"].endswith("item.done")] == answer["output"]
    deltas = [one for one in events if one["type"].endswith(".delta")]
    for index, item in enumerate(answer["output"]):
        ours = [one for one in deltas if one["output_index"] == index]
        text = "".join(one["delta"] for one in ours)
        if item["type"] == "function_call":
            item["arguments"] = text
            continue
        item["content"][0]["text"] = text
        if item["type"] == "message":
            logprobs = [entry for one in ours for entry in one["logprobs"]]
            item["content"][0]["logprobs"] = logprobs
    return _responses_body(answer)


def _responses_body(body: _Wire) -> _Wire:
    # Each writing of an item has an id of its own.
    output = [{**item, "id": ""} for item in body["output"]]
    return {**body, "output": output, "completed_at": body["completed_at"] is not None}


def _infill(frames: bytes) -> _Wire:
    events = _events(frames)
    assert [event["stop"] for event in events] == [False] * (len(events) - 1) + [True]
    return {**events[-1], "content": "".join(event["content"] for event in events)}


def _same(body: _Wire) -> _Wire:
    return body


# --- the dialects ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Case:
    """A way to answer.

    Attributes:
        begin: A fresh dialect.
        assembled: What a client makes of its stream.
        body: The unstreamed answer, without what differs from one writing to the next.
        kinds: What choices are made of.
    """

    begin: Callable[[], Dialect]
    assembled: Callable[[bytes], _Wire]
    body: Callable[[_Wire], _Wire] = _same
    choices: int = 1
    kinds: Sequence[str] = ("thought", "text", "call")
    max_calls: int = 3


def _begin_chat(**fields: object) -> Callable[[], Dialect]:
    wire = {"model": "m", "messages": [{"role": "user", "content": "x"}], "stream": True}
    wire |= {"stream_options": {"include_usage": True}, **fields}
    body = decode_body(json.dumps(wire).encode(), ChatCompletionRequest).checked()
    blank = ChatCompletionChunk(
        id="chatcmpl-1", created=1, model="m", service_tier=body.used_tier, choices=[]
    )
    return lambda: _ChatDialect(body, body.options(), blank, _TOKENIZER)


def _begin_completion(**fields: object) -> Callable[[], Dialect]:
    wire = {"model": "m", "prompt": "Hi", "stream": True}
    wire |= {"stream_options": {"include_usage": True}, **fields}
    body = decode_body(json.dumps(wire).encode(), CompletionRequest).checked()
    blank = Completion(id="cmpl-1", created=1, model="m", choices=[])
    echo = "Hi" if body.echo else ""

    def begin() -> Dialect:
        options = body.options()
        choices = [
            _GrowingChoice(index, _PROMPT, echo, body, _TOKENIZER) for index in range(options.n)
        ]
        return _CompletionDialect(options, blank, choices)

    return begin


def _begin_ollama(kind: type[OllamaDialect], *, logprobs: bool) -> Callable[[], Dialect]:
    return lambda: kind("m", "2026-01-01T00:00:00Z", _TOKENIZER if logprobs else None)


def _begin_anthropic(*, shows_thoughts: bool) -> Callable[[], Dialect]:
    return lambda: AnthropicDialect(identity_of(), "m", shows_thoughts=shows_thoughts)


def _begin_responses(**fields: object) -> Callable[[], Dialect]:
    wire = {"model": "m", "input": "x", **fields}
    body = decode_body(json.dumps(wire).encode(), ResponsesRequest).checked()
    options = body.options()
    return lambda: ResponsesDialect(
        opened_response(body, options, identity_of(), "m"),
        logprobs_from=None if options.sampling.top_logprobs is None else _TOKENIZER,
        clock=SystemClock(),
        keep=lambda _answer, _items: None,
    )


_FUNCTIONS = [{"name": "f", "parameters": {}}]
_LOGPROBS = ["message.output_text.logprobs"]
_CASES = {
    "chat": _Case(_begin_chat(), _chat, _chat_body),
    "chat choices": _Case(
        _begin_chat(n=2, logprobs=True, top_logprobs=2), _chat, _chat_body, choices=2
    ),
    "chat functions": _Case(_begin_chat(functions=_FUNCTIONS), _chat, _chat_body, max_calls=1),
    "completions": _Case(_begin_completion(), _completion),
    "completions choices": _Case(_begin_completion(n=2, logprobs=2), _completion, choices=2),
    "completions echo": _Case(_begin_completion(echo=True), _completion),
    "completions echo logprobs": _Case(
        _begin_completion(n=2, echo=True, logprobs=1), _completion, choices=2
    ),
    "ollama chat": _Case(_begin_ollama(OllamaChatDialect, logprobs=False), _ollama),
    "ollama chat logprobs": _Case(_begin_ollama(OllamaChatDialect, logprobs=True), _ollama),
    "ollama generate": _Case(_begin_ollama(OllamaGenerateDialect, logprobs=True), _ollama),
    "anthropic": _Case(_begin_anthropic(shows_thoughts=True), _anthropic, _anthropic_body),
    "anthropic no thoughts": _Case(
        _begin_anthropic(shows_thoughts=False), _anthropic, _anthropic_body
    ),
    "responses": _Case(_begin_responses(), _responses, _responses_body),
    # Log-probabilities stand with the first text that comes after or with their tokens, and a merged
    # delta does not tell which text of several that is.
    "responses logprobs": _Case(
        _begin_responses(top_logprobs=2, include=_LOGPROBS),
        _responses,
        _responses_body,
        kinds=["text"],
    ),
    "infill": _Case(lambda: _InfillDialect("m"), _infill),
}


# --- generations ----------------------------------------------------------------------------------

_TEXTS = st.text(min_size=1, max_size=4)
_LOGPROB = st.floats(-20, 0)
_TOP = st.builds(TokenLogprob, st.integers(32, 255), _LOGPROB)
_TOKENS = st.builds(SampledToken, st.just(0), st.integers(32, 255), _LOGPROB, st.tuples(_TOP, _TOP))
_SCORED = ScoredPrompt(0, (PromptLogprob(1, _PROMPT[1], -1.5, 2, (TokenLogprob(66, -0.5),)),))


@st.composite
def _choices(draw: st.DrawFn, index: int, case: _Case) -> list[ChoiceDelta]:
    """The deltas of one choice: calls whole and in order, texts between them."""
    pieces: list[OutputPiece] = []
    calls = 0
    for kind in draw(st.lists(st.sampled_from(case.kinds), max_size=6)):
        if kind == "thought":
            pieces.append(Reasoning(draw(_TEXTS)))
        elif kind == "text":
            pieces.append(Content(draw(_TEXTS)))
        elif calls < case.max_calls:
            arguments = json.dumps({"a": draw(_TEXTS)}, indent=draw(st.sampled_from([None, 1])))
            cut = draw(st.integers(1, len(arguments) - 1))
            pieces.append(ToolCallStart(calls, f"call_{index}{calls}", "f"))
            pieces += [ToolCallArguments(calls, one) for one in (arguments[:cut], arguments[cut:])]
            pieces.append(ToolCallEnd(calls))
            calls += 1
    groups: list[list[OutputPiece]] = [[]]
    for piece in pieces:
        groups[-1].append(piece)
        if draw(st.booleans()):
            groups.append([])
    deltas = [
        ChoiceDelta(
            index,
            "".join(getattr(one, "text", "") for one in group),
            tuple(draw(st.lists(_TOKENS, max_size=2))),
            None,
            tuple(group),
        )
        for group in groups
    ]
    deltas[0] = replace(deltas[0], outputs=(_SCORED, *deltas[0].outputs))
    reason = draw(
        st.sampled_from(["stop", "length", "tool_calls"] if calls else ["stop", "length"])
    )
    deltas[-1] = replace(
        deltas[-1],
        finish_reason=reason,
        stop=draw(st.sampled_from([None, "END"])) if reason == "stop" else None,
        stop_token=draw(st.none() | _TOKENS),
    )
    return deltas


@settings(max_examples=15, deadline=None)
@pytest.mark.parametrize("case", _CASES.values(), ids=_CASES.keys())
@given(data=st.data())
def test_a_stream_adds_up_to_the_unstreamed_answer(case: _Case, data: st.DataObject) -> None:
    """However choices fall into deltas: the frames, joined by a client, are the answer in one piece."""
    choices = [data.draw(_choices(index, case)) for index in range(case.choices)]
    order = [index for index, deltas in enumerate(choices) for _ in deltas]
    queues = [iter(deltas) for deltas in choices]
    kept: list[bytes] = []
    stream = KeepingDialect(case.begin(), kept.append)
    frames = stream.opening(replace(_USAGE, completion_tokens=0))
    for index in data.draw(st.permutations(order)):
        frames += stream.push(next(queues[index]))
    frames += stream.closing(_USAGE)

    unstreamed = case.begin()
    for deltas in choices:
        unstreamed.push(merge_deltas(deltas))
    body = case.body(json.loads(unstreamed.finish(_USAGE)))

    assert case.assembled(frames) == body
    assert [case.body(json.loads(one)) for one in kept] == [body]
