"""The messages of a conversation, as clients send them and as a chat template sees them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, TypeAlias

from msgspec import UNSET, Meta, Struct

from machd.dialects.wire import bounds
from machd.dialects.wire.generation_request import agreed
from machd.dialects.wire.media import media_from_url
from machd.dialects.wire.raw_json import Allowance
from machd.dialects.wire.refusal import Ignored, Refused, refuse_unsupported
from machd.dialects.wire.tools import past_arguments
from machd.errors import InvalidRequestError, UnsupportedParameterError
from machd.request.conversation import template_call
from machd.request.media import MediaKind, MediaSource, message_content


class TextPart(Struct, frozen=True, kw_only=True, tag="text", tag_field="type"):
    """A piece of text."""

    text: bounds.ContentText


class ImageUrl(Struct, frozen=True, kw_only=True):
    """An image's URL; ``detail`` is ignored, as the model's processor alone picks a resolution."""

    url: bounds.MediaText
    detail: Ignored = UNSET


class ImagePart(Struct, frozen=True, kw_only=True, tag="image_url", tag_field="type"):
    """An image; a text is short for its URL."""

    image_url: ImageUrl | bounds.MediaText


class AudioPart(Struct, frozen=True, tag="input_audio", tag_field="type"):
    """A sound; refused."""


class FilePart(Struct, frozen=True, tag="file", tag_field="type"):
    """A file; refused."""


class VideoUrl(Struct, frozen=True, kw_only=True):
    """A video's URL, and the frames to take of it."""

    url: bounds.MediaText
    fps: bounds.FramesPerSecond | None = None
    max_frames: bounds.MaxFrames | None = None


class VideoPart(Struct, frozen=True, kw_only=True, tag="video_url", tag_field="type"):
    """A video; a text is short for its URL. The frames to take may be named at either place."""

    video_url: VideoUrl | bounds.MediaText
    fps: bounds.FramesPerSecond | None = None
    max_frames: bounds.MaxFrames | None = None


class RefusalPart(Struct, frozen=True, kw_only=True, tag="refusal", tag_field="type"):
    """A text in which the assistant declines; read as any other."""

    refusal: bounds.ContentText


_Part: TypeAlias = TextPart | ImagePart | AudioPart | FilePart | VideoPart | RefusalPart
_Content: TypeAlias = bounds.ContentText | Annotated[list[_Part], Meta(max_length=1024)]


class SystemMessage(Struct, frozen=True, kw_only=True, tag="system", tag_field="role"):
    """A system message."""

    content: _Content | None = None
    name: bounds.Label | None = None


class DeveloperMessage(Struct, frozen=True, kw_only=True, tag="developer", tag_field="role"):
    """OpenAI's newer word for a system message; templates see ``system``."""

    content: _Content | None = None
    name: bounds.Label | None = None


class UserMessage(Struct, frozen=True, kw_only=True, tag="user", tag_field="role"):
    """A message of the user's."""

    content: _Content | None = None
    name: bounds.Label | None = None


class CalledFunction(Struct, frozen=True, kw_only=True):
    """The function of a call, with the JSON text of an object as its arguments."""

    name: bounds.CallId
    arguments: bounds.ContentText


class MessageToolCall(Struct, frozen=True, kw_only=True, tag="function", tag_field="type"):
    """A call that the model made."""

    id: bounds.CallId
    function: CalledFunction


class AssistantMessage(Struct, frozen=True, kw_only=True, tag="assistant", tag_field="role"):
    """A message of the model's.

    Attributes:
        function_call: The one call of OpenAI's API before tools.
        refusal: OpenAI's word for a text that declines; it stands where there is no content.
        reasoning_content: What it thought; ``reasoning`` is another server's word for it.
    """

    content: _Content | None = None
    name: bounds.Label | None = None
    tool_calls: Annotated[list[MessageToolCall], Meta(max_length=bounds.MAX_TOOLS)] | None = None
    reasoning_content: bounds.ContentText | None = None
    reasoning: bounds.ContentText | None = None
    refusal: bounds.ContentText | None = None
    function_call: CalledFunction | None = None
    audio: Refused = UNSET


class FunctionMessage(Struct, frozen=True, kw_only=True, tag="function", tag_field="role"):
    """Result of a function, in OpenAI's API before tools."""

    content: _Content | None = None
    name: bounds.CallId


class ToolMessage(Struct, frozen=True, kw_only=True, tag="tool", tag_field="role"):
    """Result of a tool."""

    content: _Content | None = None
    tool_call_id: bounds.Label
    name: bounds.Label | None = None


ChatMessage: TypeAlias = (
    SystemMessage
    | DeveloperMessage
    | UserMessage
    | AssistantMessage
    | FunctionMessage
    | ToolMessage
)

ChatMessageList = Annotated[list[ChatMessage], Meta(min_length=1, max_length=8192)]
"""A conversation, oldest message first."""

_TEMPLATE_ROLES = {"developer": "system", "function": "tool"}
"""Roles that templates know by another name."""


def check_messages(messages: Sequence[ChatMessage]) -> None:
    """Refuse what a template could not be given.

    Raises:
        UnsupportedParameterError: A part is a sound or a file, or an assistant's message holds
            what machd does not take; ``param`` says where.
        InvalidRequestError: A tool answers though nothing was called, or an image or a video is in
            neither a user's nor a tool's message.
    """
    has_called = False
    for index, message in enumerate(messages):
        where = f"messages[{index}]."
        if isinstance(message, AssistantMessage):
            refuse_unsupported(message, where=where)
            has_called |= bool(message.tool_calls or message.function_call)
        elif isinstance(message, ToolMessage | FunctionMessage) and not has_called:
            raise InvalidRequestError.at(f"{where}role", "no message before this one calls a tool")
        if message.content is not None and not isinstance(message.content, str):
            takes_media = isinstance(message, UserMessage | ToolMessage)
            _check_parts(message.content, takes_media=takes_media, where=f"{where}content")


def check_final_message(messages: Sequence[ChatMessage], *, opens_turn: bool | None) -> None:
    """Raise InvalidRequestError unless the last message is a text of the assistant's, without calls.

    With ``opens_turn`` it could not be continued.
    """
    if opens_turn is not False:
        raise InvalidRequestError(
            "continue_final_message needs add_generation_prompt: false",
            param="continue_final_message",
        )
    last = messages[-1]
    has_called = isinstance(last, AssistantMessage) and (last.tool_calls or last.function_call)
    said = _content(last, where="")
    has_text = isinstance(said, str) and bool(said.strip())
    if not isinstance(last, AssistantMessage) or has_called or not has_text:
        raise InvalidRequestError(
            "continue_final_message needs a last message that is a text of the assistant's",
            param="continue_final_message",
        )


def template_messages(messages: Sequence[ChatMessage]) -> list[dict[str, object]]:
    """Checked messages as :class:`machd.request.conversation.Conversation` has them.

    Text parts are joined without anything between them, and a tool's message gets the name of the
    function that it answers for. Images and videos are decoded from base64, for a worker thread.

    Raises:
        InvalidRequestError: The arguments of calls are nested too deeply or have too many parts, or
            an image or a video is not what can be read or fetched.
    """
    names: dict[str, str] = {}
    seen = []
    allowance = Allowance()
    for index, message in enumerate(messages):
        where = f"messages[{index}]."
        one = _template_message(message, names, where=where)
        if isinstance(message, AssistantMessage):
            names |= {call.id: call.function.name for call in _calls(message)}
            one |= _assistant_fields(message, allowance, where=where)
        seen.append(one)
    return seen


def gap_between(text: str, later: str) -> str:
    """Return the text between two texts of one message that a call kept apart: a new line, if need be.

    Readers of answers drop the white space around calls, and words must not grow together.
    """
    if not text or not later or text[-1].isspace() or later[0].isspace():
        return ""
    return "\n"


def _check_parts(parts: Sequence[_Part], *, takes_media: bool, where: str) -> None:
    for index, part in enumerate(parts):
        param = f"{where}[{index}].type"
        kind = part.__struct_config__.tag
        if isinstance(part, AudioPart | FilePart):
            raise UnsupportedParameterError.at(
                param,
                f'parts of type "{kind}" are not supported; send "text", "image_url" or '
                '"video_url"',
            )
        if isinstance(part, ImagePart | VideoPart) and not takes_media:
            raise InvalidRequestError.at(
                param,
                f'parts of type "{kind}" are taken in messages of the roles "user" and '
                '"tool" only; send it in one of these',
            )


def _template_message(
    message: ChatMessage, names: Mapping[str, str], *, where: str
) -> dict[str, object]:
    role = str(message.__struct_config__.tag)
    seen: dict[str, object] = {
        "role": _TEMPLATE_ROLES.get(role, role),
        "content": _content(message, where=where),
    }
    name = message.name
    if isinstance(message, ToolMessage):
        seen["tool_call_id"] = message.tool_call_id
        name = name or names.get(message.tool_call_id)
    elif isinstance(message, FunctionMessage):
        seen["tool_call_id"] = _legacy_call_id(message.name)
    if name is not None:
        seen["name"] = name
    return seen


def _calls(message: AssistantMessage) -> Sequence[MessageToolCall]:
    """The calls of a message, a legacy one among them."""
    if message.tool_calls or message.function_call is None:
        return message.tool_calls or ()
    function = message.function_call
    return [MessageToolCall(id=_legacy_call_id(function.name), function=function)]


def _legacy_call_id(name: str) -> str:
    """An id for a call that has none: results name the function that they are of."""
    return f"call_{name}"


def _assistant_fields(
    message: AssistantMessage, allowance: Allowance, *, where: str
) -> dict[str, object]:
    """Return the fields of an assistant's message beside its text."""
    seen: dict[str, object] = {}
    if thoughts := message.reasoning_content or message.reasoning:
        seen["reasoning_content"] = thoughts
    if calls := _calls(message):
        place = "tool_calls[{index}].function" if message.tool_calls else "function_call"
        seen["tool_calls"] = [
            template_call(
                call.id,
                call.function.name,
                past_arguments(
                    call.function.arguments,
                    param=f"{where}{place.format(index=index)}.arguments",
                    allowance=allowance,
                ),
            )
            for index, call in enumerate(calls)
        ]
    return seen


def _content(message: ChatMessage, *, where: str) -> str | list[dict[str, object]]:
    content = message.content
    if content is None and isinstance(message, AssistantMessage):
        content = message.refusal
    if content is None or isinstance(content, str):
        return content or ""
    return message_content(
        _piece(part, where=f"{where}content[{index}].") for index, part in enumerate(content)
    )


def _piece(part: _Part, *, where: str) -> str | MediaSource:
    match part:
        case TextPart(text=text):
            return text
        case RefusalPart(refusal=text):
            return text
        case ImagePart(image_url=str(url)):
            return media_from_url(url, MediaKind.IMAGE, param=f"{where}image_url")
        case ImagePart(image_url=ImageUrl(url=url)):
            return media_from_url(url, MediaKind.IMAGE, param=f"{where}image_url.url")
        case VideoPart():
            return _video(part, where=where)
        case _:
            return ""


def _video(part: VideoPart, *, where: str) -> MediaSource:
    found = part.video_url
    inner = VideoUrl(url=found) if isinstance(found, str) else found
    return media_from_url(
        inner.url,
        MediaKind.VIDEO,
        param=f"{where}video_url" if isinstance(found, str) else f"{where}video_url.url",
        fps=agreed({f"{where}fps": part.fps, f"{where}video_url.fps": inner.fps}),
        max_frames=agreed(
            {
                f"{where}max_frames": part.max_frames,
                f"{where}video_url.max_frames": inner.max_frames,
            }
        ),
    )
