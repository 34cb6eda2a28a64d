"""The items of ``/v1/responses``, as a client sends them and as they are stored.

An item is a message, a tool's call, its output, or thoughts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal, TypeAlias

from msgspec import Meta, Struct

from machd.dialects.wire.bounds import CallId, ContentText, Label
from machd.errors import InvalidRequestError, UnsupportedParameterError


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


class InputImagePart(Struct, frozen=True, tag="input_image", tag_field="type"):
    """An image; refused."""


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
            UnsupportedParameterError: A part is no text.
        """
        for name in _NEEDED[self.type or "message"]:
            if getattr(self, name) is None:
                param = f"{place}.{name}"
                raise InvalidRequestError(f"{param}: required, but missing", param=param)
        text_parts = (ReasoningTextPart,) if self.type == "reasoning" else _TEXT_PARTS
        _check_parts(self.content, text_parts, f"{place}.content")
        _check_parts(self.output, _TEXT_PARTS, f"{place}.output")
        return self

    @property
    def text(self) -> str:
        """Its content or output; parts are joined without anything between them."""
        content = self.output if (self.type or "").endswith("_output") else self.content
        if content is None or isinstance(content, str):
            return content or ""
        return "".join(_part_text(part) for part in content)


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
            param = f"{place}[{index}].type"
            right = " or ".join(f'"{kind.__struct_config__.tag}"' for kind in kinds)
            raise UnsupportedParameterError(
                f'{param}: parts of type "{part.__struct_config__.tag}" are not supported here; '
                f"send {right}",
                param=param,
            )


def _part_text(part: _Part) -> str:
    match part:
        case InputTextPart() | OutputTextPart() | ReasoningTextPart() | SummaryTextPart():
            return part.text
        case RefusalTextPart():
            return part.refusal
        case _:
            return ""
