"""The messages of a conversation, as clients send them and as a chat template sees them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, TypeAlias

from msgspec import UNSET, Meta, Struct

from machd.api.bounds import ContentText, Label
from machd.api.refusal import Refused, neutral_values, refuse_unsupported
from machd.errors import InvalidRequestError, UnsupportedParameterError

__all__ = [
    "AssistantMessage",
    "AudioPart",
    "ChatMessage",
    "ChatMessageList",
    "DeveloperMessage",
    "FilePart",
    "ImagePart",
    "RefusalPart",
    "SystemMessage",
    "TextPart",
    "ToolMessage",
    "UserMessage",
    "VideoPart",
    "check_messages",
    "template_messages",
]


class TextPart(Struct, frozen=True, kw_only=True, tag="text", tag_field="type"):
    """A piece of text."""

    text: ContentText


class ImagePart(Struct, frozen=True, tag="image_url", tag_field="type"):
    """An image; refused."""


class AudioPart(Struct, frozen=True, tag="input_audio", tag_field="type"):
    """A sound; refused."""


class FilePart(Struct, frozen=True, tag="file", tag_field="type"):
    """A file; refused."""


class VideoPart(Struct, frozen=True, tag="video_url", tag_field="type"):
    """A video; refused."""


class RefusalPart(Struct, frozen=True, tag="refusal", tag_field="type"):
    """A refusal of the assistant's; refused in its turn."""


_Part: TypeAlias = TextPart | ImagePart | AudioPart | FilePart | VideoPart | RefusalPart
_Content: TypeAlias = ContentText | Annotated[list[_Part], Meta(min_length=1, max_length=1024)]


class SystemMessage(Struct, frozen=True, kw_only=True, tag="system", tag_field="role"):
    """What the operator of a conversation says."""

    content: _Content
    name: Label | None = None


class DeveloperMessage(Struct, frozen=True, kw_only=True, tag="developer", tag_field="role"):
    """OpenAI's newer word for a system message; templates see ``system``."""

    content: _Content
    name: Label | None = None


class UserMessage(Struct, frozen=True, kw_only=True, tag="user", tag_field="role"):
    """What the user says."""

    content: _Content
    name: Label | None = None


class AssistantMessage(Struct, frozen=True, kw_only=True, tag="assistant", tag_field="role"):
    """What the model said. ``content`` may be null only beside what machd refuses."""

    content: _Content | None = None
    name: Label | None = None
    refusal: Refused = UNSET
    audio: Refused = UNSET
    tool_calls: Refused = UNSET
    function_call: Refused = UNSET


class ToolMessage(Struct, frozen=True, kw_only=True, tag="tool", tag_field="role"):
    """What a tool returned."""

    content: _Content
    tool_call_id: Label
    name: Label | None = None


ChatMessage: TypeAlias = (
    SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage
)

ChatMessageList = Annotated[list[ChatMessage], Meta(min_length=1, max_length=8192)]
"""A conversation, oldest message first."""

_ASSISTANT_NEUTRAL = neutral_values(AssistantMessage)

_TEMPLATE_ROLES: tuple[tuple[type[Struct], str], ...] = (
    (SystemMessage, "system"),
    (DeveloperMessage, "system"),
    (UserMessage, "user"),
    (AssistantMessage, "assistant"),
    (ToolMessage, "tool"),
)


def check_messages(messages: Sequence[ChatMessage]) -> None:
    """Refuse what a template could not be given.

    Raises:
        UnsupportedParameterError: A part is not text, or an assistant's message holds more
            than text; ``param`` says where.
        InvalidRequestError: An assistant's message has no content.
    """
    for index, message in enumerate(messages):
        where = f"messages[{index}]."
        if isinstance(message, AssistantMessage):
            refuse_unsupported(message, _ASSISTANT_NEUTRAL, where=where)
        if message.content is None:
            raise InvalidRequestError(
                f"{where}content: required, but missing", param=f"{where}content"
            )
        if not isinstance(message.content, str):
            _check_parts(message.content, where=f"{where}content")


def template_messages(messages: Sequence[ChatMessage]) -> list[dict[str, object]]:
    """Checked messages as templates read them: a role, one text, and the names if given.

    Text parts are joined without anything between them.
    """
    return [_template_message(message) for message in messages]


def _check_parts(parts: Sequence[_Part], *, where: str) -> None:
    for index, part in enumerate(parts):
        if not isinstance(part, TextPart):
            param = f"{where}[{index}].type"
            kind = part.__struct_config__.tag
            raise UnsupportedParameterError(
                f'{param}: parts of type "{kind}" are not supported; send "text"', param=param
            )


def _template_message(message: ChatMessage) -> dict[str, object]:
    role = next(role for kind, role in _TEMPLATE_ROLES if isinstance(message, kind))
    seen: dict[str, object] = {"role": role, "content": _text(message.content)}
    if message.name is not None:
        seen["name"] = message.name
    if isinstance(message, ToolMessage):
        seen["tool_call_id"] = message.tool_call_id
    return seen


def _text(content: _Content | None) -> str:
    assert content is not None, "check_messages comes first"
    if isinstance(content, str):
        return content
    return "".join(part.text for part in content if isinstance(part, TextPart))
