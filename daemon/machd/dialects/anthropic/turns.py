"""Anthropic's messages: their blocks of content, and the turns that a chat template reads."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import UNSET, Meta, Struct

from machd.dialects.chat.messages import gap_between
from machd.dialects.wire.bounds import ContentText, Label, MediaText
from machd.dialects.wire.media import media_from_base64, media_from_url
from machd.dialects.wire.raw_json import Allowance, JsonObject, raw_object
from machd.dialects.wire.refusal import Ignored
from machd.errors import InvalidRequestError, UnsupportedParameterError
from machd.request.conversation import template_call
from machd.request.media import MediaKind, MediaSource, message_content

_BETWEEN_BLOCKS = "\n"


class TextBlock(Struct, frozen=True, kw_only=True, tag="text", tag_field="type"):
    """A piece of text."""

    text: ContentText
    cache_control: Ignored = UNSET
    citations: Ignored = UNSET


class ThinkingBlock(Struct, frozen=True, kw_only=True, tag="thinking", tag_field="type"):
    """The model's thoughts. machd signs nothing, so any signature will do."""

    thinking: ContentText
    signature: ContentText | None = None


class RedactedThinkingBlock(
    Struct, frozen=True, kw_only=True, tag="redacted_thinking", tag_field="type"
):
    """Another server's encrypted thoughts; unreadable here, so they are left out."""

    data: ContentText | None = None


class ToolUseBlock(Struct, frozen=True, kw_only=True, tag="tool_use", tag_field="type"):
    """A call that the model asked for; ``input`` holds its arguments."""

    id: Annotated[Label, Meta(min_length=1)]
    name: Annotated[Label, Meta(min_length=1)]
    input: JsonObject
    cache_control: Ignored = UNSET


class Base64Source(Struct, frozen=True, kw_only=True, tag="base64", tag_field="type"):
    """An image's file."""

    media_type: Label
    data: MediaText


class UrlSource(Struct, frozen=True, kw_only=True, tag="url", tag_field="type"):
    """The source of an image."""

    url: MediaText


class FileSource(Struct, frozen=True, kw_only=True, tag="file", tag_field="type"):
    """A stored file; refused, as none are stored."""

    file_id: Ignored = UNSET


class ImageBlock(Struct, frozen=True, kw_only=True, tag="image", tag_field="type"):
    """An image."""

    source: Base64Source | UrlSource | FileSource
    cache_control: Ignored = UNSET


class DocumentSource(Struct, frozen=True, kw_only=True):
    """A document's source: ``text`` has ``data``, ``content`` has blocks; other types are refused."""

    type: Label
    data: ContentText | None = None
    content: ContentText | Annotated[list[TextBlock], Meta(max_length=1024)] | None = None


class DocumentBlock(Struct, frozen=True, kw_only=True, tag="document", tag_field="type"):
    """A document; one of text is read as text, with its title and context before it."""

    source: DocumentSource
    title: Label | None = None
    context: ContentText | None = None
    cache_control: Ignored = UNSET
    citations: Ignored = UNSET

    @property
    def text(self) -> str | None:
        """Title, context and body, a line each; None for a document that is no text."""
        if self.source.type not in ("text", "content"):
            return None
        body = self.source.data or joined_text(blocks_of(self.source.content))
        return _BETWEEN_BLOCKS.join(one for one in (self.title, self.context, body) if one)


class SearchResultBlock(Struct, frozen=True, tag="search_result", tag_field="type"):
    """A result of a search; refused."""


_ResultPart: TypeAlias = TextBlock | ImageBlock | DocumentBlock | SearchResultBlock


class ToolResultBlock(Struct, frozen=True, kw_only=True, tag="tool_result", tag_field="type"):
    """Result of a call, or its failure."""

    tool_use_id: Annotated[Label, Meta(min_length=1)]
    content: ContentText | Annotated[list[_ResultPart], Meta(max_length=1024)] | None = None
    is_error: bool | None = None
    cache_control: Ignored = UNSET


Block: TypeAlias = (
    TextBlock
    | ThinkingBlock
    | RedactedThinkingBlock
    | ToolUseBlock
    | ToolResultBlock
    | ImageBlock
    | DocumentBlock
    | SearchResultBlock
)

MessageContent: TypeAlias = ContentText | Annotated[list[Block], Meta(max_length=1024)]
"""A message's content; a text is short for one text block."""

SystemContent: TypeAlias = ContentText | Annotated[list[TextBlock], Meta(max_length=1024)]
"""What the operator of a conversation says."""

_B = TypeVar("_B", bound=Struct)


def blocks_of(content: str | Sequence[_B] | None) -> list[_B | TextBlock]:
    """Content as blocks."""
    if content is None:
        return []
    return [TextBlock(text=content)] if isinstance(content, str) else list(content)


def joined_text(blocks: Sequence[Struct]) -> str:
    """The texts among the blocks, documents included; separate blocks are separate lines."""
    texts = [block.text for block in blocks if isinstance(block, TextBlock | DocumentBlock)]
    return _BETWEEN_BLOCKS.join(text for text in texts if text)


def check_blocks(blocks: Sequence[Struct], *, role: str, where: str, allowance: Allowance) -> None:
    """Refuse what a role's message cannot hold.

    ``where`` is the content's path in the request, such as ``messages[2].content``; ``allowance`` bounds
    the inputs of all calls together.

    Raises:
        UnsupportedParameterError: A block is not text, an image, a thought, a call or a result.
        InvalidRequestError: Another role's message holds such blocks, or a call's input is
            nested too deeply or has too many parts.
    """
    for index, block in enumerate(blocks):
        place = f"{where}[{index}]"
        kind = block.__struct_config__.tag
        is_document = isinstance(block, DocumentBlock) and block.text is None
        if is_document or isinstance(block, SearchResultBlock):
            raise UnsupportedParameterError.at(
                f"{place}.type",
                f'blocks of type "{kind}" are not supported; send "text" or "image"',
            )
        if not isinstance(block, _KINDS_BY_ROLE[role]):
            raise InvalidRequestError.at(
                f"{place}.type",
                f'a message of the role "{role}" cannot hold blocks of type "{kind}"',
            )
        if isinstance(block, ImageBlock) and isinstance(block.source, FileSource):
            raise UnsupportedParameterError.at(
                f"{place}.source.type",
                'no files are stored here; send a source of the type "base64"',
            )
        if isinstance(block, ToolResultBlock):
            check_blocks(
                blocks_of(block.content), role="user", where=f"{place}.content", allowance=allowance
            )
        elif isinstance(block, ToolUseBlock):
            raw_object(block.input, param=f"{place}.input", max_bytes=None, allowance=allowance)


_KINDS_BY_ROLE: dict[str, tuple[type[Struct], ...]] = {
    "system": (TextBlock,),
    "user": (TextBlock, ImageBlock, DocumentBlock, ToolResultBlock),
    "assistant": (TextBlock, ThinkingBlock, RedactedThinkingBlock, ToolUseBlock),
}


_ERROR_MARK = "Error: "
"""Before the result of a call that failed: templates have no other place to say so."""


class AnthropicMessage(Struct, frozen=True, kw_only=True):
    """One message; a ``system`` message is one that comes in the middle of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: MessageContent


AnthropicMessageList: TypeAlias = Annotated[
    list[AnthropicMessage], Meta(min_length=1, max_length=8192)
]
"""A conversation, oldest message first."""


@dataclass(frozen=True, slots=True)
class Turns:
    """A conversation as templates read it.

    Attributes:
        messages: As :class:`machd.request.conversation.Conversation` has them.
        continues_final_message: The last one is the beginning of the answer.
        indices: Of each message, the index of the request's message that it begins with; None for ``system``.
    """

    messages: list[dict[str, object]]
    continues_final_message: bool
    indices: list[int | None] = field(default_factory=list, compare=False)


@dataclass(slots=True)
class _Turn:
    """The messages of one role in a row, joined.

    Attributes:
        where: The first message's place in the request.
        index: The first message's index there; None for ``system``.
        places: Each block's place there.
    """

    role: str
    where: str
    index: int | None
    blocks: list[Block]
    places: list[str]


def read_turns(system: SystemContent | None, messages: Sequence[AnthropicMessage]) -> Turns:
    """Check a conversation and put it into templates' words.

    Raises:
        UnsupportedParameterError: A block is not text, an image, a thought, a call or a result.
        InvalidRequestError: The order of roles is wrong, a result answers no call or a call has no
            result, the last message cannot be continued, or an image is not what can be read or
            fetched.
    """
    turns = list(_merged(_turns(system, messages)))
    _check_first(turns)
    rendered: list[dict[str, object]] = []
    indices: list[int | None] = []
    calls: dict[str, str] = {}
    for turn in turns:
        match turn.role:
            case "user":
                rendered += _user_messages(turn, calls)
                calls = {}
            case "assistant":
                _check_answered(calls, turn.where)
                calls = _calls(turn)
                rendered.append(_assistant_message(turn))
            case _:
                rendered.append({"role": "system", "content": joined_text(turn.blocks)})
        indices += [turn.index] * (len(rendered) - len(indices))
    _check_answered(calls, "messages")
    if turns[-1].role != "assistant":
        return Turns(rendered, continues_final_message=False, indices=indices)
    if rendered[-1] == {"role": "assistant", "content": ""}:
        return Turns(rendered[:-1], continues_final_message=False, indices=indices[:-1])
    _check_prefill(rendered[-1], turns[-1].where)
    return Turns(rendered, continues_final_message=True, indices=indices)


def _turns(system: SystemContent | None, messages: Sequence[AnthropicMessage]) -> Iterable[_Turn]:
    """One turn a message, the system's first, each checked by itself."""
    if system:
        yield _turn("system", "system", None, blocks_of(system), "system")
    allowance = Allowance()
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        blocks = blocks_of(message.content)
        check_blocks(blocks, role=message.role, where=f"{where}.content", allowance=allowance)
        yield _turn(message.role, where, index, blocks, f"{where}.content")


def _turn(
    role: str, where: str, index: int | None, blocks: Sequence[Block], content_place: str
) -> _Turn:
    return _Turn(role, where, index, [*blocks], _places(blocks, content_place))


def _places(blocks: Sequence[Struct], content_place: str) -> list[str]:
    return [f"{content_place}[{index}]" for index in range(len(blocks))]


def _merged(turns: Iterable[_Turn]) -> Iterable[_Turn]:
    held: _Turn | None = None
    for turn in turns:
        if held is not None and held.role == turn.role:
            held.blocks += turn.blocks
            held.places += turn.places
            continue
        if held is not None:
            yield held
        held = turn
    if held is not None:
        yield held


def _check_first(turns: Sequence[_Turn]) -> None:
    first = next((turn for turn in turns if turn.role != "system"), None)
    if first is None or first.role != "user":
        where = "messages" if first is None else f"{first.where}.role"
        raise InvalidRequestError.at(
            where, 'a conversation begins with a message of the role "user"'
        )


def _user_messages(turn: _Turn, calls: dict[str, str]) -> list[dict[str, object]]:
    """The results of the assistant's calls, then what the user says beside them."""
    results = [
        (block, place)
        for block, place in zip(turn.blocks, turn.places, strict=True)
        if isinstance(block, ToolResultBlock)
    ]
    unanswered = dict(calls)
    messages: list[dict[str, object]] = []
    for result, place in results:
        name = unanswered.pop(result.tool_use_id, None)
        if name is None:
            raise InvalidRequestError.at(
                turn.where, "a tool_result needs a tool_use of its own in the message before"
            )
        messages.append(
            {
                "role": "tool",
                "tool_call_id": result.tool_use_id,
                "name": name,
                "content": _result_content(result, place),
            }
        )
    _check_answered(unanswered, turn.where)
    if not messages or len(results) < len(turn.blocks):
        pieces = _pieces(turn.blocks, turn.places)
        content = message_content(pieces, between=_BETWEEN_BLOCKS)
        messages.append({"role": "user", "content": content})
    return messages


def _result_content(result: ToolResultBlock, place: str) -> str | list[dict[str, object]]:
    blocks = blocks_of(result.content)
    pieces = _pieces(blocks, _places(blocks, f"{place}.content"))
    if result.is_error:
        first = pieces.pop(0) if pieces and isinstance(pieces[0], str) else ""
        pieces.insert(0, f"{_ERROR_MARK}{first}")
    return message_content(pieces, between=_BETWEEN_BLOCKS)


def _pieces(blocks: Sequence[Struct], places: Sequence[str]) -> list[str | MediaSource]:
    """Texts and images in their order; no text is empty."""
    pieces = (
        _image(block, place) if isinstance(block, ImageBlock) else joined_text([block])
        for block, place in zip(blocks, places, strict=True)
    )
    return [piece for piece in pieces if piece]


def _image(block: ImageBlock, place: str) -> MediaSource:
    match block.source:
        case Base64Source(media_type=media_type, data=data):
            param = f"{place}.source.data"
            return media_from_base64(data, MediaKind.IMAGE, param=param, media_type=media_type)
        case UrlSource(url=url):
            return media_from_url(url, MediaKind.IMAGE, param=f"{place}.source.url")
        case FileSource():
            raise AssertionError("refused before")


def _calls(turn: _Turn) -> dict[str, str]:
    """Names of a turn's calls by their ids."""
    calls: dict[str, str] = {}
    for block in turn.blocks:
        if isinstance(block, ToolUseBlock):
            if block.id in calls:
                raise InvalidRequestError.at(turn.where, "two tool_use blocks have the same id")
            calls[block.id] = block.name
    return calls


def _check_answered(calls: dict[str, str], where: str) -> None:
    if calls:
        raise InvalidRequestError.at(
            where, "each tool_use needs a tool_result in the message after it"
        )


def _assistant_message(turn: _Turn) -> dict[str, object]:
    message: dict[str, object] = {"role": "assistant", "content": _said(turn.blocks)}
    thoughts = [block.thinking for block in turn.blocks if isinstance(block, ThinkingBlock)]
    if any(thoughts):
        message["reasoning_content"] = "\n".join(thought for thought in thoughts if thought)
    calls = [block for block in turn.blocks if isinstance(block, ToolUseBlock)]
    if calls:
        message["tool_calls"] = [
            template_call(call.id, call.name, msgspec.json.decode(call.input)) for call in calls
        ]
    return message


def _said(blocks: Sequence[Block]) -> str:
    """An answer's text. Its blocks are pieces of one text, unless a call stood between them."""
    texts: list[str] = []
    is_after_call = False
    for block in blocks:
        if isinstance(block, ToolUseBlock):
            is_after_call = True
        elif isinstance(block, TextBlock) and block.text:
            if is_after_call and texts:
                texts.append(gap_between(texts[-1], block.text))
            texts.append(block.text)
            is_after_call = False
    return "".join(texts)


def _check_prefill(message: dict[str, object], where: str) -> None:
    text = message["content"]
    assert isinstance(text, str), "an assistant's message has a text"
    if not text:
        raise InvalidRequestError.at(
            f"{where}.content",
            "a final message of the assistant's has to end with text to go on from",
        )
    if text[-1].isspace():
        raise InvalidRequestError.at(
            f"{where}.content", "a final message of the assistant's cannot end with white space"
        )
