"""``predict``: a chat completion, or a text completion, whose events become fragments and statistics."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from msgspec import Raw, Struct

from machd.dialects.lm_studio_socket.history import chat_messages, whole_text
from machd.dialects.lm_studio_socket.messages import (
    AnyPrediction,
    ConfigStack,
    PredictionParameter,
    RawTextParameter,
)
from machd.dialects.lm_studio_socket.models import LLM, find, instance_info
from machd.dialects.lm_studio_socket.session import Channel
from machd.dialects.wire.decoding import decode_body
from machd.errors import InvalidRequestError, UnsupportedParameterError
from machd.http.inner_request import AnsweredError

_PREFIX = "llm.prediction."
_DATA = b"data: "
_DONE = b"[DONE]"
_NULL = Raw(b"null")
_BEGIN_OF_THOUGHT, _END_OF_THOUGHT = "<think>", "</think>"

_NUMBERS = {
    "temperature": "temperature",
    "topKSampling": "top_k",
    "topPSampling": "top_p",
    "minPSampling": "min_p",
    "repeatPenalty": "repetition_penalty",
    "maxPredictedTokens": "max_tokens",
    "seed": "seed",
}
"""Keys of settings, without their prefix, and the fields of a completion that mean the same. Others are hints for
LM Studio's engines."""

_PROMPT_PROGRESS = {
    "type": "promptProcessingProgress",
    "progress": 0.0,
    "details": {
        "cachedTokenCount": 0,
        "totalPromptTokenCount": 0,
        "processedPromptTokenCount": 0,
        "unprocessedPromptTokenCount": 0,
    },
}
"""How far a prompt is, is not known; but the package for Python gives up after a minute without a message."""

_STOP_REASONS = {"stop": "eosFound", "tool_calls": "toolCalls"}


class _CallFunction(Struct, frozen=True):
    name: str = ""
    arguments: str = ""


class _CallPiece(Struct, frozen=True):
    index: int
    id: str = ""
    function: _CallFunction = _CallFunction()


class _Delta(Struct, frozen=True):
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[_CallPiece] = []


class _Choice(Struct, frozen=True):
    delta: _Delta = _Delta()
    text: str = ""
    finish_reason: str | None = None


class _Usage(Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int


class _Chunk(Struct, frozen=True):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Raw = _NULL


class _Checkbox(Struct, frozen=True):
    """A setting that may be off."""

    checked: bool
    value: Raw = _NULL


class _Structure(Struct, frozen=True, rename="camel"):
    type: str
    json_schema: Raw = _NULL


class _Tools(Struct, frozen=True):
    type: str
    tools: Raw = Raw(b"[]")
    force: bool = False


async def predict(channel: Channel, parameter: bytes) -> None:
    """Go on with a conversation, in fragments of text as they come."""
    wanted = decode_body(parameter, PredictionParameter)
    if wanted.prediction_config_stack.is_text_completion:
        await _complete(channel, wanted, whole_text(wanted.history))
    else:
        body = {"messages": chat_messages(wanted.history)}
        await _tell_answer(channel, wanted, "POST /v1/chat/completions", body)


async def complete_raw_text(channel: Channel, parameter: bytes) -> None:
    """Go on with a text; the package for TypeScript has this from version 2 on."""
    wanted = decode_body(parameter, RawTextParameter)
    await _complete(channel, wanted, wanted.raw_prompt)


async def _complete(channel: Channel, wanted: AnyPrediction, prompt: str) -> None:
    await _tell_answer(channel, wanted, "POST /v1/completions", {"prompt": prompt})


async def _tell_answer(
    channel: Channel, wanted: AnyPrediction, route: str, asked: dict[str, Any]
) -> None:
    if wanted.fuzzy_preset_identifier is not None:
        raise UnsupportedParameterError.at("fuzzyPresetIdentifier", "presets are not served here")
    stack = wanted.prediction_config_stack
    options = _options(stack)
    model = await find(channel.client, wanted.model_specifier.name, LLM)
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    answer = GrowingAnswer(channel)
    body = {"model": model.key, **stream, **options, **asked}
    await channel.client.stream(route, body, answer.take)
    if answer.error is not None:
        raise AnsweredError(500, answer.error)
    await answer.end_thought()
    await answer.tell_calls()
    await channel.send(
        {
            "type": "success",
            "stats": answer.stats(options.get("max_tokens")),
            "modelInfo": instance_info(await find(channel.client, model.key, LLM)),
            "loadModelConfig": {"fields": []},
            "predictionConfig": {
                "fields": [{"key": key, "value": value} for key, value in stack.fields.items()]
            },
        }
    )


def chat_tools(tools: Raw) -> list[dict[str, Any]]:
    """Return tools as a chat completion has them, which is as they come."""
    return decode_body(bytes(tools), list[dict[str, Any]])


def _options(stack: ConfigStack) -> dict[str, Any]:
    """Fields of a completion that settings ask for.

    Raises:
        InvalidRequestError: A setting has no value of its kind, or is one that is not served.
    """
    options: dict[str, Any] = {}
    for key, raw in stack.fields.items():
        name = key.removeprefix(_PREFIX)
        value = bytes(raw)
        if name in _NUMBERS:
            if value.startswith(b"{"):
                box = decode_body(value, _Checkbox)
                value = bytes(box.value) if box.checked else bytes(_NULL)
            options[_NUMBERS[name]] = Raw(value)
        elif name == "stopStrings":
            options["stop"] = decode_body(value, list[str]) or None
        elif name == "structured":
            options |= _structure(decode_body(value, _Structure))
        elif name == "tools":
            options |= _tools(decode_body(value, _Tools))
        elif name == "promptTemplate" and not stack.is_text_completion:
            raise UnsupportedParameterError.at(key, "a template comes with its model only")
    return options


def _structure(wanted: _Structure) -> dict[str, Any]:
    if wanted.type == "none":
        return {}
    if wanted.type != "json":
        raise UnsupportedParameterError.at(
            f"{_PREFIX}structured", "answers are bound to JSON or a JSON schema here"
        )
    if bytes(wanted.json_schema) == bytes(_NULL):
        return {"response_format": {"type": "json_object"}}
    schema = {"name": "answer", "schema": wanted.json_schema}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


def _tools(wanted: _Tools) -> dict[str, Any]:
    if wanted.type == "none" or not (tools := chat_tools(wanted.tools)):
        return {}
    return {"tools": tools, "tool_choice": "required" if wanted.force else "auto"}


class GrowingAnswer:
    """An answer while it is told to the client.

    Attributes:
        error: What ended it, as JSON; None unless something did.
    """

    def __init__(self, channel: Channel) -> None:
        self.error: bytes | None = None
        self._channel = channel
        self._now_s = asyncio.get_running_loop().time
        self._begin_s = self._now_s()
        self._first_s: float | None = None
        self._fragments = 0
        self._is_thinking = False
        self._calls: dict[int, _CallPiece] = {}
        self._usage: _Usage | None = None
        self._finish_reason = ""

    async def take(self, frame: bytes) -> None:
        """Take an event of the stream; a comment tells that the prompt is still being computed."""
        if not frame.startswith(_DATA):
            if self._first_s is None:
                await self._channel.send(_PROMPT_PROGRESS)
            return
        data = frame.removeprefix(_DATA)
        if data == _DONE or self._channel.client.has_left:
            return
        chunk = msgspec.json.decode(data, type=_Chunk)
        if bytes(chunk.error) != bytes(_NULL):
            self.error = data
        self._usage = chunk.usage or self._usage
        for choice in chunk.choices:
            await self._take_delta(choice.delta)
            if choice.text:
                await self._tell(choice.text)
            self._finish_reason = choice.finish_reason or self._finish_reason

    async def end_thought(self) -> None:
        """Tell the end of thoughts that have begun."""
        if self._is_thinking:
            self._is_thinking = False
            await self._tell(_END_OF_THOUGHT, "reasoningEndTag", tokens=0)

    async def tell_calls(self) -> None:
        """Tell the calls of tools, each at once: its arguments are whole.

        Raises:
            InvalidRequestError: The answer was cut in the middle of one.
        """
        for call in self._calls.values():
            await self._channel.send({"type": "toolCallGenerationStart", "toolCallId": call.id})
            name = call.function.name
            try:
                arguments = decode_body(call.function.arguments.encode(), dict[str, Any])
            except InvalidRequestError:
                problem = {"title": f"the call of {name} was cut short"}
                await self._channel.send({"type": "toolCallGenerationFailed", "error": problem})
                continue
            request = {"type": "function", "id": call.id, "name": name, "arguments": arguments}
            await self._channel.send({"type": "toolCallGenerationEnd", "toolCallRequest": request})

    def stats(self, max_tokens: Raw | None) -> dict[str, object]:
        """Figures of the answer; where the client has cancelled it, its fragments count as its tokens."""
        now_s = self._now_s()
        first_s = self._first_s or now_s
        tokens = self._fragments if self._usage is None else self._usage.completion_tokens
        stats: dict[str, object] = {
            "stopReason": self._stop_reason(tokens, max_tokens),
            "timeToFirstTokenSec": first_s - self._begin_s,
            "totalTimeSec": now_s - self._begin_s,
            "predictedTokensCount": tokens,
        }
        if now_s > first_s:
            stats["tokensPerSecond"] = tokens / (now_s - first_s)
        if self._usage is not None:
            stats["promptTokensCount"] = self._usage.prompt_tokens
            stats["totalTokensCount"] = self._usage.prompt_tokens + tokens
        return stats

    def _stop_reason(self, tokens: int, max_tokens: Raw | None) -> str:
        if self._channel.client.has_left:
            return "userStopped"
        if self._finish_reason != "length":
            return _STOP_REASONS.get(self._finish_reason, "eosFound")
        is_asked = max_tokens is not None and bytes(max_tokens) == str(tokens).encode()
        return "maxPredictedTokensReached" if is_asked else "contextLengthReached"

    async def _take_delta(self, delta: _Delta) -> None:
        if delta.reasoning_content:
            if not self._is_thinking:
                self._is_thinking = True
                await self._tell(_BEGIN_OF_THOUGHT, "reasoningStartTag", tokens=0)
            await self._tell(delta.reasoning_content, "reasoning")
        if delta.content:
            await self.end_thought()
            await self._tell(delta.content)
        for piece in delta.tool_calls:
            known = self._calls.get(piece.index, _CallPiece(piece.index))
            self._calls[piece.index] = _CallPiece(
                piece.index,
                known.id + piece.id,
                _CallFunction(
                    known.function.name + piece.function.name,
                    known.function.arguments + piece.function.arguments,
                ),
            )

    async def _tell(self, text: str, kind: str = "none", *, tokens: int = 1) -> None:
        if self._first_s is None:
            self._first_s = self._now_s()
        self._fragments += tokens
        fragment = {
            "content": text,
            "tokensCount": tokens,
            "containsDrafted": False,
            "reasoningType": kind,
            "isStructural": False,
        }
        await self._channel.send({"type": "fragment", "fragment": fragment})
