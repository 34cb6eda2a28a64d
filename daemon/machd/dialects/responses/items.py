"""The items of a conversation: as clients send them, in a chain over several responses, and as messages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import UNSET, Meta, Struct

from machd.dialects.responses.tools import CUSTOM_INPUT
from machd.dialects.wire.bounds import CallId, ContentText, Label, MediaText
from machd.dialects.wire.media import media_from_url
from machd.dialects.wire.raw_json import Allowance
from machd.dialects.wire.refusal import Ignored, Refused, refuse_unsupported
from machd.dialects.wire.tools import past_arguments
from machd.errors import InvalidRequestError, UnsupportedParameterError
from machd.request.conversation import template_call
from machd.request.media import MediaKind, MediaSource, message_content


class InputTextPart(Struct, frozen=True, kw_only=True, tag="input_text", tag_field="type"):
    """A piece of text of the user's or the operator's."""

    text: ContentText


class OutputTextPart(Struct, frozen=True, kw_only=True, tag="output_text", tag_field="type"):
    """A piece of text of the assistant's."""

    text: ContentText


class RefusalTextPart(Struct, frozen=True, kw_only=True, tag="refusal", tag_field="type"):
    """A refusal of the assistant's, in its words; text like any other."""

    refusal: ContentText


class SummaryTextPart(Struct, frozen=True, kw_only=True, tag="summary_text", tag_field="type"):
    """A summary of thoughts; no template takes one."""

    text: ContentText


class ReasoningTextPart(Struct, frozen=True, kw_only=True, tag="reasoning_text", tag_field="type"):
    """Some of the assistant's thoughts."""

    text: ContentText


class InputImagePart(
    Struct, frozen=True, kw_only=True, omit_defaults=True, tag="input_image", tag_field="type"
):
    """An image by its URL; one by ``file_id`` is refused, as no files are stored.

    Attributes:
        detail: Ignored, as the model's processor alone picks a resolution.
    """

    image_url: MediaText | None = None
    file_id: Refused = UNSET
    detail: Ignored = UNSET


class InputFilePart(Struct, frozen=True, tag="input_file", tag_field="type"):
    """A file; refused."""


class InputAudioPart(Struct, frozen=True, tag="input_audio", tag_field="type"):
    """A sound; refused."""


_Part: TypeAlias = (
    InputTextPart
    | OutputTextPart
    | RefusalTextPart
    | SummaryTextPart
    | ReasoningTextPart
    | InputImagePart
    | InputFilePart
    | InputAudioPart
)
_Parts = Annotated[list[_Part], Meta(max_length=1024)]
_TEXT_PARTS = (InputTextPart, OutputTextPart, RefusalTextPart)
_SHOWN_PARTS = (*_TEXT_PARTS, InputImagePart)


class InputItem(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One item. One type for all kinds, because a message need not say that it is one.

    Attributes:
        type: A message unless it says otherwise.
        id: The item's own; of an ``item_reference``, the item that it stands for.
        status: Of what the model made: ``incomplete`` where it was cut short.
        role: Of a message.
        content: Of a message; of thoughts, ``reasoning_text`` parts.
        call_id: Of a call and of its output.
        name: Of the tool that is called.
        arguments: Of a function's call; JSON text of an object.
        input: Of a custom tool's call; any text.
        output: Of a call.
        summary: Of thoughts; accepted, and not shown to the model.
        encrypted_content: Of thoughts; accepted, and nothing that machd could read.
    """

    type: (
        Literal[
            "message",
            "function_call",
            "function_call_output",
            "custom_tool_call",
            "custom_tool_call_output",
            "reasoning",
            "item_reference",
        ]
        | None
    ) = None
    id: Label | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: ContentText | _Parts | None = None
    call_id: CallId | None = None
    name: CallId | None = None
    arguments: ContentText | None = None
    input: ContentText | None = None
    output: ContentText | _Parts | None = None
    summary: _Parts | None = None
    encrypted_content: ContentText | None = None

    def checked(self, place: str) -> InputItem:
        """The item, once it has what its kind needs.

        Raises:
            InvalidRequestError: Something is missing.
            UnsupportedParameterError: A part is neither a text nor an image that can stand there.
        """
        for name in _NEEDED[self.type or "message"]:
            if getattr(self, name) is None:
                raise InvalidRequestError.at(f"{place}.{name}", "required, but missing")
        shown_parts = _SHOWN_PARTS if self.role == "user" else _TEXT_PARTS
        content_parts = (ReasoningTextPart,) if self.type == "reasoning" else shown_parts
        _check_parts(self.content, content_parts, f"{place}.content")
        _check_parts(self.output, _SHOWN_PARTS, f"{place}.output")
        return self

    @property
    def text(self) -> str:
        """The text of its content; parts are joined without anything between them."""
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        return "".join(_part_text(part) for part in self.content)

    def message_content(self, place: str) -> str | list[dict[str, object]]:
        """Its content or output as a template message has it; images are decoded from base64.

        Raises:
            InvalidRequestError: An image is not what can be read or fetched.
        """
        name = "output" if (self.type or "").endswith("_output") else "content"
        found = self.output if name == "output" else self.content
        if found is None or isinstance(found, str):
            return found or ""
        return message_content(
            _piece(part, f"{place}.{name}[{index}]") for index, part in enumerate(found)
        )


_NEEDED: Mapping[str, tuple[str, ...]] = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "custom_tool_call": ("call_id", "name", "input"),
    "custom_tool_call_output": ("call_id", "output"),
    "reasoning": (),
    "item_reference": ("id",),
}


def _check_parts(
    content: str | Sequence[_Part] | None, kinds: tuple[type[Struct], ...], place: str
) -> None:
    if content is None or isinstance(content, str):
        return
    for index, part in enumerate(content):
        if not isinstance(part, kinds):
            right = " or ".join(f'"{kind.__struct_config__.tag}"' for kind in kinds)
            raise UnsupportedParameterError.at(
                f"{place}[{index}].type",
                f'parts of type "{part.__struct_config__.tag}" are not supported here; '
                f"send {right}",
            )
        if isinstance(part, InputImagePart):
            _check_image(part, f"{place}[{index}]")


def _check_image(part: InputImagePart, place: str) -> None:
    if part.image_url is not None:
        refuse_unsupported(part, where=f"{place}.")
    elif part.file_id is not UNSET:
        raise UnsupportedParameterError.at(
            f"{place}.file_id",
            "no files are stored here; send the image in image_url, as a data: URL",
        )
    else:
        raise InvalidRequestError.at(f"{place}.image_url", "required, but missing")


def _piece(part: _Part, place: str) -> str | MediaSource:
    if isinstance(part, InputImagePart):
        assert part.image_url is not None, "checked before"
        return media_from_url(part.image_url, MediaKind.IMAGE, param=f"{place}.image_url")
    return _part_text(part)


def _part_text(part: _Part) -> str:
    match part:
        case InputTextPart() | OutputTextPart() | ReasoningTextPart() | SummaryTextPart():
            return part.text
        case RefusalTextPart():
            return part.refusal
        case _:
            return ""


_MAX_ITEMS = 8192
"""Items of a conversation; as many as one request may bring."""

_MAX_STORED_BYTES = 8 * 1024 * 1024
"""What a short body may bring in of what is stored: an earlier conversation, and references."""


@dataclass(frozen=True, slots=True)
class PlacedItem:
    """A checked item, and the place in the request that errors about it name.

    Attributes:
        index: Of the request's items; None for one that the request does not hold itself.
    """

    item: InputItem
    place: str
    index: int | None = None


@dataclass(frozen=True, slots=True)
class ItemChain:
    """A conversation's items, oldest first.

    Attributes:
        added: Those that the request adds to the conversation before it, as JSON.
    """

    items: tuple[PlacedItem, ...]
    added: tuple[bytes, ...]


def item_chain(
    given: str | Sequence[InputItem],
    *,
    previous: Sequence[bytes] = (),
    referenced: Mapping[str, bytes] | None = None,
) -> ItemChain:
    """The items of a request, after those of the responses before it.

    ``previous`` are the items of the chain that ``previous_response_id`` ends; ``referenced`` are by id what is stored of
    the items that ``given`` refers to. Both are JSON.

    Raises:
        InvalidRequestError: An item refers to nothing that is stored, or there are too many items
            or too many bytes of them.
    """
    room_bytes = _MAX_STORED_BYTES - sum(map(len, previous))
    if room_bytes < 0:
        raise _too_long(f"{_MAX_STORED_BYTES} bytes")
    items = [PlacedItem(_decoded(one), "previous_response_id") for one in previous]
    added: list[bytes] = []
    seen = {one.item.id for one in items}
    for placed, data in _resolved(given, referenced or {}, room_bytes):
        # What a chain holds already is not said twice, though clients do name it again.
        if data is not None and placed.item.id in seen:
            continue
        seen.add(placed.item.id)
        items.append(placed)
        added.append(data or msgspec.json.encode(placed.item))
    if len(items) > _MAX_ITEMS:
        raise _too_long(f"{_MAX_ITEMS} items")
    return ItemChain(tuple(items), tuple(added))


def _resolved(
    given: str | Sequence[InputItem], referenced: Mapping[str, bytes], room_bytes: int
) -> Iterator[tuple[PlacedItem, bytes | None]]:
    """Each item that is worth keeping; those behind references with their bytes."""
    if isinstance(given, str):
        yield PlacedItem(InputItem(type="message", role="user", content=given), "input"), None
        return
    for index, item in enumerate(given):
        place = f"input[{index}]"
        if item.type == "item_reference":
            data = _stored(item, referenced, place)
            room_bytes -= len(data)
            if room_bytes < 0:
                raise InvalidRequestError.at(
                    place,
                    f"what is stored may bring in {_MAX_STORED_BYTES} bytes, and the "
                    "references bring in more",
                )
            yield PlacedItem(_decoded(data), place, index), data
        elif item.type != "reasoning" or item.text:
            kept = msgspec.structs.replace(item, summary=None, encrypted_content=None)
            yield PlacedItem(kept, place, index), None


def _stored(item: InputItem, referenced: Mapping[str, bytes], place: str) -> bytes:
    data = referenced.get(item.id or "")
    if data is None:
        raise InvalidRequestError.at(
            f"{place}.id",
            "no such item is stored here; it may belong to a response with "
            "store: false or to one that was dropped",
        )
    return data


def _too_long(limit: str) -> InvalidRequestError:
    return InvalidRequestError.at(
        "previous_response_id",
        f"a conversation may have {limit}, and this one has more; start a "
        "new one with what matters of it",
    )


def _decoded(data: bytes) -> InputItem:
    return msgspec.json.decode(data, type=InputItem)


_SYSTEM = "system"
_ASSISTANT = "assistant"


@dataclass(frozen=True, slots=True)
class ItemMessages:
    """The messages that items become.

    Attributes:
        indices: Of each message, the index in the request of the item that it begins with; None where that is not one of its own.
    """

    messages: list[dict[str, object]]
    indices: list[int | None]


def item_messages(items: Iterable[PlacedItem], *, instructions: str | None) -> ItemMessages:
    """The conversation as :class:`machd.request.conversation.Conversation` has it.

    Items are checked, the oldest first; instructions stand before all of them.

    Raises:
        InvalidRequestError: A call has no output, an output has no call, a call's arguments are
            nested too deeply, or an image is not what can be read or fetched.
    """
    messages = _Messages()
    if instructions:
        messages.instruct(instructions)
    for placed in items:
        messages.add(placed)
    return messages.finished()


@dataclass(slots=True)
class _Turn:
    """The assistant's texts, thoughts and calls in a row."""

    # Texts stay apart until the end: joining them one by one takes the square of their length.
    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[dict[str, object]] = field(default_factory=list)

    def message(self) -> dict[str, object]:
        message: dict[str, object] = {"role": _ASSISTANT, "content": "".join(self.texts)}
        if self.thoughts:
            message["reasoning_content"] = "".join(self.thoughts)
        if self.calls:
            message["tool_calls"] = self.calls
        return message


class _Messages:
    def __init__(self) -> None:
        self._opening_words: list[str] = []
        self._held_words: list[tuple[str, int | None]] = []
        self._messages: list[dict[str, object] | _Turn] = []
        self._indices: list[int | None] = []
        self._opening_index: int | None = None
        self._index: int | None = None  # of the item that is added
        self._open: _Turn | None = None
        self._functions: dict[str, str] = {}
        self._unanswered: dict[str, str] = {}
        self._allowance = Allowance()

    def add(self, placed: PlacedItem) -> None:
        item, place, self._index = placed.item, placed.place, placed.index
        match item.type:
            case "function_call" | "custom_tool_call":
                self._call(item, place)
            case "function_call_output" | "custom_tool_call_output":
                self._answer(item, place)
            case "reasoning":
                self._turn(may_have_text=False).thoughts.append(item.text)
            case _:
                self._say_checked(item, place)

    def instruct(self, text: str) -> None:
        """Add the operator's words; the first ones are one message, as templates take one alone.

        Words between a call and its output come behind the output, which nothing may stand in front of.
        """
        if self._unanswered:
            self._held_words.append((text, self._index))
            return
        self._open = None
        if self._messages:
            self._append({"role": _SYSTEM, "content": text})
            return
        if not self._opening_words:
            self._opening_index = self._index
        self._opening_words.append(text)

    def finished(self) -> ItemMessages:
        self._check_answered("input")
        messages = [one.message() if isinstance(one, _Turn) else one for one in self._messages]
        if not self._opening_words:
            return ItemMessages(messages, self._indices)
        opening: dict[str, object] = {"role": _SYSTEM, "content": "\n\n".join(self._opening_words)}
        return ItemMessages([opening, *messages], [self._opening_index, *self._indices])

    def _append(self, message: dict[str, object] | _Turn) -> None:
        self._messages.append(message)
        self._indices.append(self._index)

    def _say_checked(self, item: InputItem, place: str) -> None:
        if item.role == _ASSISTANT:
            self._turn(may_have_text=False).texts.append(item.text)
            return
        if item.role == "user":
            self._check_answered(place)
            self._open = None
            self._append({"role": "user", "content": item.message_content(place)})
        else:
            self.instruct(item.text)

    def _call(self, item: InputItem, place: str) -> None:
        if item.status == "incomplete":
            return  # cut short: there is nothing that could be called, and no output of it
        assert item.call_id is not None, "checked before"
        if item.call_id in self._functions:
            raise InvalidRequestError.at(f"{place}.call_id", "an earlier call has the same id")
        arguments = _arguments(item, self._allowance, place)
        call = template_call(item.call_id, item.name, arguments)
        self._turn(may_have_text=True).calls.append(call)
        self._functions[item.call_id] = item.name or ""
        self._unanswered[item.call_id] = place

    def _answer(self, item: InputItem, place: str) -> None:
        assert item.call_id is not None, "checked before"
        if self._unanswered.pop(item.call_id, None) is None:
            raise InvalidRequestError.at(
                f"{place}.call_id", "no call before it waits for this output"
            )
        if not self._unanswered:
            self._open = None
        self._append(
            {
                "role": "tool",
                "content": item.message_content(place),
                "tool_call_id": item.call_id,
                "name": self._functions[item.call_id],
            }
        )
        while self._held_words and not self._unanswered:
            words, self._index = self._held_words.pop(0)
            self.instruct(words)

    def _turn(self, *, may_have_text: bool) -> _Turn:
        """The assistant's turn to add to: the open one, or a new one.

        A turn whose calls wait stays open whatever is added: models write text and thoughts
        between calls, and outputs come after all of it.
        """
        if self._open is None or not (
            may_have_text or self._unanswered or not any(self._open.texts)
        ):
            self._open = _Turn()
            self._append(self._open)
        return self._open

    def _check_answered(self, place: str) -> None:
        """Refuse to go on while a call waits for its output."""
        if self._unanswered:
            call = next(iter(self._unanswered.values()))
            raise InvalidRequestError(
                f"{call}: a function_call has no function_call_output after it; send one before "
                "anybody else says something",
                param=place,
            )


def _arguments(item: InputItem, allowance: Allowance, place: str) -> dict[str, object]:
    if item.type == "custom_tool_call":
        return {CUSTOM_INPUT: item.input}
    assert item.arguments is not None, "checked before"
    return past_arguments(item.arguments, param=f"{place}.arguments", allowance=allowance)
