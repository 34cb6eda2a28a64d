"""The blocks of content that Anthropic's messages are made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, TypeAlias, TypeVar

from msgspec import UNSET, Meta, Struct

from machd.dialects.wire.bounds import ContentText, Label
from machd.dialects.wire.raw_json import Allowance, JsonObject, raw_object
from machd.dialects.wire.refusal import Ignored
from machd.errors import InvalidRequestError, UnsupportedParameterError

_BETWEEN_BLOCKS = "\n"


class TextBlock(Struct, frozen=True, kw_only=True, tag="text", tag_field="type"):
    """A piece of text."""

    text: ContentText
    cache_control: Ignored = UNSET
    citations: Ignored = UNSET


class ThinkingBlock(Struct, frozen=True, kw_only=True, tag="thinking", tag_field="type"):
    """What the model thought. machd signs nothing, so any signature will do."""

    thinking: ContentText
    signature: ContentText | None = None


class RedactedThinkingBlock(
    Struct, frozen=True, kw_only=True, tag="redacted_thinking", tag_field="type"
):
    """Another server's encrypted thoughts; nobody here can read them, so they are left out."""

    data: ContentText | None = None


class ToolUseBlock(Struct, frozen=True, kw_only=True, tag="tool_use", tag_field="type"):
    """A call that the model asked for; ``input`` holds its arguments."""

    id: Annotated[Label, Meta(min_length=1)]
    name: Annotated[Label, Meta(min_length=1)]
    input: JsonObject
    cache_control: Ignored = UNSET


class ImageBlock(Struct, frozen=True, tag="image", tag_field="type"):
    """An image; refused."""


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
    """What a call returned, or how it failed."""

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

    Args:
        blocks: As :func:`blocks_of` gives them.
        role: Whose message it is.
        where: Path of the content in the request, such as ``messages[2].content``.
        allowance: What the inputs of all calls share.

    Raises:
        UnsupportedParameterError: A block is not text, a thought, a call or a result.
        InvalidRequestError: Another role's message holds such blocks, or a call's input is
            nested too deeply or has too many parts.
    """
    for index, block in enumerate(blocks):
        place = f"{where}[{index}]"
        kind = block.__struct_config__.tag
        is_document = isinstance(block, DocumentBlock) and block.text is None
        if is_document or isinstance(block, ImageBlock | SearchResultBlock):
            raise UnsupportedParameterError(
                f'{place}.type: blocks of type "{kind}" are not supported; send "text"',
                param=f"{place}.type",
            )
        if not isinstance(block, _KINDS_BY_ROLE[role]):
            raise InvalidRequestError(
                f'{place}.type: a message of the role "{role}" cannot hold blocks of type "{kind}"',
                param=f"{place}.type",
            )
        if isinstance(block, ToolResultBlock):
            check_blocks(
                blocks_of(block.content), role="user", where=f"{place}.content", allowance=allowance
            )
        elif isinstance(block, ToolUseBlock):
            raw_object(block.input, param=f"{place}.input", max_bytes=None, allowance=allowance)


_KINDS_BY_ROLE: dict[str, tuple[type[Struct], ...]] = {
    "system": (TextBlock,),
    "user": (TextBlock, DocumentBlock, ToolResultBlock),
    "assistant": (TextBlock, ThinkingBlock, RedactedThinkingBlock, ToolUseBlock),
}
