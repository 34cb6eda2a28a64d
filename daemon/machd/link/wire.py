"""Messages as parts of a frame: msgpack by the types' annotations, with hooks for four types that msgspec lacks.

Arrays, of images, videos and vectors, are separate parts, which are never copied, however many sequences of a request share them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import convert
from msgspec.msgpack import Decoder, Encoder

from machd.engine.protocol.media import PlainArray
from machd.errors import MachdError
from machd.link.error_form import error_as_data, error_from_data
from machd.link.frames import Part
from machd.link.messages import Message, ToEngine, ToFront
from machd.request.constraint import Constraint
from machd.request.generation import Grammar
from machd.settings.model import Settings


class _Outgoing:
    """The parts of a message that is being encoded."""

    def __init__(self) -> None:
        self.arrays: list[PlainArray] = []
        self._places: dict[int, int] = {}

    def as_data(self, value: object) -> object:
        if not isinstance(value, PlainArray):
            return _as_data(value)
        place = self._places.setdefault(id(value), len(self.arrays))
        if place == len(self.arrays):
            self.arrays.append(value)
        return value.shape, value.dtype, place


class _Incoming:
    """The parts of a message that is being decoded."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._contents = parts[1:]

    def from_data(self, kind: type, data: object) -> object:
        if kind is not PlainArray:
            return _from_data(kind, data)
        shape, dtype, place = convert(data, tuple[tuple[int, ...], str, int])
        return PlainArray(shape, dtype, memoryview(self._contents[place]))


def _as_data(value: object) -> object:
    match value:
        case MachdError():
            return error_as_data(value)
        case Grammar():
            return value.source, value.constraint, value.ignored_keywords
        case Settings():
            return value.model_dump_json()
        case _:
            raise NotImplementedError(f"{type(value).__name__} does not cross the link")


def _from_data(kind: type, data: object) -> object:
    if kind is MachdError:
        return error_from_data(data)
    if kind is Grammar:
        source, constraint, ignored_keywords = convert(
            data, tuple[str, Constraint, tuple[str, ...]]
        )
        return Grammar(source, constraint, None, ignored_keywords)
    assert kind is Settings, f"{kind.__name__} does not cross the link"
    return Settings.model_validate_json(convert(data, str))


_FRONT_DECODER: Decoder[Any] = Decoder(ToFront, dec_hook=_from_data)
"""Of messages without arrays: those of each step."""


def encode(message: Message) -> list[Part]:
    """Return a message as parts.

    Raises:
        NotImplementedError: It has a value of a type that does not cross the link.
    """
    outgoing = _Outgoing()
    content = Encoder(enc_hook=outgoing.as_data).encode(message)
    return [content, *(one.content for one in outgoing.arrays)]


def decode_to_engine(parts: Sequence[Part]) -> ToEngine:
    """Decode a message of the front; its arrays of images and videos are views of ``parts``.

    Raises:
        DecodeError: No message: an unknown name, a field too few or too many, or of another type.
    """
    decoder: Decoder[Any] = Decoder(ToEngine, dec_hook=_Incoming(parts).from_data)
    message: ToEngine = decoder.decode(parts[0])
    return message


def decode_to_front(parts: Sequence[Part]) -> ToFront:
    """Decode a message of the engine process; its arrays are views of ``parts``.

    Raises:
        DecodeError: No message: an unknown name, a field too few or too many, or of another type.
    """
    decoder = (
        _FRONT_DECODER if len(parts) == 1 else Decoder(ToFront, dec_hook=_Incoming(parts).from_data)
    )
    message: ToFront = decoder.decode(parts[0])
    return message
