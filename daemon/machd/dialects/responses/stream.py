"""A generation as OpenAI's response object, whole or as a stream of named events."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
from msgspec import Raw

from machd.clock import Clock
from machd.dialects.logprobs import chat_logprobs
from machd.dialects.responses import answer
from machd.dialects.responses.output import EventFrames, ResponseOutput
from machd.dialects.responses.request import ResponsesRequest
from machd.dialects.responses.tools import (
    ResponsesTool,
    ResponsesToolChoice,
    SchemaTextFormat,
)
from machd.dialects.wire.response_format import TextFormat
from machd.engine.protocol.tokenizer import Tokenizer
from machd.errors import InvalidRequestError, MachdError, UnavailableError
from machd.generations.choice import ChoiceDelta
from machd.generations.generation import GenerationUsage
from machd.generations.identity import GenerationIdentity
from machd.http.sse import COMMENT_KEEP_ALIVE, EVENT_STREAM
from machd.request.generation import GenerationOptions

KeepResponse = Callable[[bytes, Sequence[answer.OutputItem]], None]
"""Told of a finished response: its JSON, and the items that it made."""


class ResponsesDialect:
    """Response objects. There is one choice, always."""

    media_type = EVENT_STREAM
    keep_alive = COMMENT_KEEP_ALIVE

    def __init__(
        self,
        opened: answer.Response,
        *,
        logprobs_from: Tokenizer | None,
        clock: Clock,
        keep: KeepResponse,
        tells_cache: bool = False,
    ) -> None:
        """Write one response, whose usage has the cache's diagnosis if ``tells_cache``.

        ``keep`` is told once, when the response ended well; never of one that failed or was aborted.
        """
        self._opened = opened
        self._logprobs_from = logprobs_from
        self._clock = clock
        self._keep = keep
        self._tells_cache = tells_cache
        self._frames = EventFrames()
        self._output = ResponseOutput(self._frames, custom_tools=_custom_tools(opened))
        self._is_cut_short = False
        self._has_begun = False

    def opening(self, _usage: GenerationUsage) -> bytes:
        """The response without any item, twice, as OpenAI's clients want it."""
        return self._begin()

    def push(self, delta: ChoiceDelta) -> bytes:
        """Return the items' events; with the last delta, the end of the last item."""
        frames = self._output.push(delta.pieces, self._logprobs(delta))
        if delta.finish_reason is None:
            return frames
        self._is_cut_short = delta.finish_reason == "length"
        return frames + self._output.finish("incomplete" if self._is_cut_short else "completed")

    def closing(self, usage: GenerationUsage) -> bytes:
        """The whole response once more; there is no ``[DONE]``."""
        last = answer.ResponseIncomplete if self._is_cut_short else answer.ResponseCompleted
        return self._frames.frame(last, response=Raw(self.finish(usage)))

    def failure(self, error: MachdError) -> bytes:
        """The response as far as its items are done; it begins first, where it has not."""
        begun = b"" if self._has_begun else self._begin()
        response = msgspec.structs.replace(
            self._opened, status="failed", error=_failure(error), output=self._output.items
        )
        return begun + self._frames.frame(answer.ResponseFailed, response=response)

    def finish(self, usage: GenerationUsage) -> bytes:
        """Return the response that the last event of a stream holds, once it is kept."""
        response = msgspec.structs.replace(
            self._opened,
            status="incomplete" if self._is_cut_short else "completed",
            completed_at=None if self._is_cut_short else int(self._clock.unix_s()),
            incomplete_details=answer.IncompleteDetails() if self._is_cut_short else None,
            output=self._output.items,
            usage=answer.ResponseUsage.of(usage, tells_cache=self._tells_cache),
        )
        whole = msgspec.json.encode(response)
        self._keep(whole, response.output)
        return whole

    def _begin(self) -> bytes:
        self._has_begun = True
        return b"".join(
            self._frames.frame(kind, response=self._opened)
            for kind in (answer.ResponseCreated, answer.ResponseInProgress)
        )

    def _logprobs(self, delta: ChoiceDelta) -> list[answer.OutputTokenLogprob]:
        if self._logprobs_from is None:
            return []
        entries = chat_logprobs(delta.tokens, self._logprobs_from)
        return msgspec.convert(entries, list[answer.OutputTokenLogprob], from_attributes=True)


def opened_response(
    body: ResponsesRequest,
    options: GenerationOptions,
    identity: GenerationIdentity,
    model_id: str,
) -> answer.Response:
    """A response before its first token: the request, given back."""
    return answer.Response(
        id=identity.generation_id,
        created_at=identity.created_unix_s,
        status="in_progress",
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        max_tool_calls=body.max_tool_calls,
        model=model_id,
        output=[],
        parallel_tool_calls=body.parallel_tool_calls is not False,
        previous_response_id=body.previous_response_id,
        prompt_cache_key=body.prompt_cache_key,
        reasoning=msgspec.convert(body.reasoning or {}, answer.ReasoningEcho, from_attributes=True),
        safety_identifier=body.safety_identifier,
        service_tier=body.used_tier,
        store=body.is_stored,
        temperature=options.sampling.temperature,
        truncation=body.truncation or "disabled",
        text=_text(body),
        tool_choice=_tool_choice(body.tool_choice),
        tools=[_tool(one) for one in body.tools or () if one.is_served],
        top_logprobs=options.sampling.top_logprobs or 0,
        top_p=options.sampling.top_p,
        user=body.user,
        metadata=body.metadata or {},
    )


def _text(body: ResponsesRequest) -> answer.TextEcho:
    asked = (body.text.format if body.text else None) or TextFormat()
    if isinstance(asked, SchemaTextFormat):
        asked = msgspec.structs.replace(asked, schema=_one_line(asked.schema))
    return answer.TextEcho(format=asked)


def _one_line(raw: Raw) -> Raw:
    """A client's JSON without its line breaks, which would end an event too early."""
    return Raw(msgspec.json.format(bytes(raw), indent=-1))


def _custom_tools(opened: answer.Response) -> frozenset[str]:
    return frozenset(one.name for one in opened.tools if isinstance(one, answer.CustomToolEcho))


def _tool(tool: ResponsesTool) -> answer.FunctionToolEcho | answer.CustomToolEcho:
    if tool.type == "custom":
        return answer.CustomToolEcho(
            name=tool.name or "", description=tool.description, format=tool.format
        )
    return answer.FunctionToolEcho(
        name=tool.name or "",
        description=tool.description,
        parameters=_one_line(tool.parameters) if isinstance(tool.parameters, Raw) else None,
        strict=bool(tool.strict),
    )


def _tool_choice(choice: ResponsesToolChoice | None) -> answer.ToolChoiceEcho:
    if choice is None:
        return "auto"
    if isinstance(choice, str):
        return choice
    if choice.type == "allowed_tools":
        named = [_forced(one.type, one.name) for one in choice.tools or () if one.is_served]
        return answer.AllowedToolsEcho(mode=choice.mode or "auto", tools=named)
    return _forced(choice.type, choice.name)


def _forced(kind: str, name: str | None) -> answer.ForcedFunction | answer.ForcedCustomTool:
    return (answer.ForcedCustomTool if kind == "custom" else answer.ForcedFunction)(name=name or "")


def _failure(error: MachdError) -> answer.ResponseFailure:
    match error:
        case UnavailableError():
            return answer.ResponseFailure(code="rate_limit_exceeded", message=error.message)
        case InvalidRequestError():
            return answer.ResponseFailure(code="invalid_prompt", message=error.message)
        case _:
            return answer.ResponseFailure(code="server_error", message=error.message)
