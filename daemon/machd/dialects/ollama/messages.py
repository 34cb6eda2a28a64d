"""The messages of Ollama's chats, as clients send them and as a chat template sees them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal, TypeAlias

from msgspec import UNSET, Meta, Struct

from machd.dialects.wire.bounds import MAX_TOOLS, CallId, ContentText, Label
from machd.dialects.wire.raw_json import Allowance, JsonObject, raw_object
from machd.dialects.wire.refusal import Ignored, Refused, neutral_values, refuse_unsupported


class OllamaCalledFunction(Struct, frozen=True, kw_only=True):
    """The function of a call, with its arguments as an object.

    Attributes:
        index: Ignored; calls count in their order.
    """

    name: CallId
    arguments: JsonObject
    index: Ignored = UNSET


class OllamaToolCall(Struct, frozen=True, kw_only=True):
    """A call that the model made; Ollama's older clients drop its id."""

    function: OllamaCalledFunction
    id: CallId | None = None


class OllamaMessage(Struct, frozen=True, kw_only=True):
    """One turn.

    Attributes:
        thinking: What the assistant thought.
        tool_name: Of a tool's message, the function that it answers for.
        tool_call_id: Of a tool's message, the call that it answers.
    """

    role: Literal["system", "user", "assistant", "tool"]
    content: ContentText | None = None
    thinking: ContentText | None = None
    tool_calls: Annotated[list[OllamaToolCall], Meta(max_length=MAX_TOOLS)] | None = None
    tool_name: Label | None = None
    tool_call_id: Label | None = None
    images: Refused = UNSET

    @property
    def text(self) -> str:
        """Its content; none is empty."""
        return self.content or ""


OllamaMessageList: TypeAlias = Annotated[list[OllamaMessage], Meta(max_length=8192)]
"""A conversation, oldest message first; none at all asks whether the model is loaded."""

_NEUTRAL = neutral_values(OllamaMessage)


def ollama_template_messages(messages: Sequence[OllamaMessage]) -> list[dict[str, object]]:
    """Messages as :class:`machd.request.conversation.Conversation` has them.

    Calls without an id get one, and a result without the id of its call answers the oldest open
    call of its function, or else the oldest open call.

    Raises:
        UnsupportedParameterError: A message holds images.
        InvalidRequestError: The arguments of calls are nested too deeply or have too many parts.
    """
    seen = []
    open_calls: dict[str, str] = {}
    allowance = Allowance()
    for index, message in enumerate(messages):
        refuse_unsupported(message, _NEUTRAL, where=f"messages[{index}].")
        one: dict[str, object] = {"role": message.role, "content": message.text}
        if message.role == "assistant":
            one |= _assistant_fields(message, open_calls, allowance, position=index)
        elif message.role == "tool":
            one |= _result_fields(message, open_calls)
        seen.append(one)
    return seen


def _assistant_fields(
    message: OllamaMessage, open_calls: dict[str, str], allowance: Allowance, *, position: int
) -> dict[str, object]:
    """What an assistant's message holds beside its text; its calls become open."""
    fields: dict[str, object] = {}
    if message.thinking:
        fields["reasoning_content"] = message.thinking
    calls = []
    for index, call in enumerate(message.tool_calls or ()):
        call_id = call.id or f"call_{position}_{index}"
        open_calls[call_id] = call.function.name
        arguments = raw_object(
            call.function.arguments,
            param=f"messages[{position}].tool_calls[{index}].function.arguments",
            max_bytes=None,
            allowance=allowance,
        )
        function = {"name": call.function.name, "arguments": arguments}
        calls.append({"id": call_id, "type": "function", "function": function})
    if calls:
        fields["tool_calls"] = calls
    return fields


def _result_fields(message: OllamaMessage, open_calls: dict[str, str]) -> dict[str, object]:
    """The call that a tool's message answers, which is open no longer, and its function's name."""
    named = [call for call, name in open_calls.items() if name == message.tool_name]
    call_id = message.tool_call_id or next(iter(named or open_calls), "")
    name = message.tool_name or open_calls.get(call_id)
    open_calls.pop(call_id, None)
    return {"tool_call_id": call_id, **({"name": name} if name else {})}
