"""Messages as bytes: msgpack, each type by its annotations, and three types that msgspec does not know."""

from __future__ import annotations

from typing import Any

from msgspec import convert
from msgspec.msgpack import Decoder, Encoder

from machd.errors import MachdError
from machd.link.error_form import error_as_data, error_from_data
from machd.link.messages import Message, ToEngine, ToFront
from machd.request.constraint import Constraint
from machd.request.generation import Grammar
from machd.settings.model import Settings


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


_ENCODER = Encoder(enc_hook=_as_data)
_ENGINE_DECODER: Decoder[Any] = Decoder(ToEngine, dec_hook=_from_data)
_FRONT_DECODER: Decoder[Any] = Decoder(ToFront, dec_hook=_from_data)


def encode(message: Message) -> bytes:
    """Return a message as bytes.

    Raises:
        NotImplementedError: It holds what does not cross the link.
    """
    return _ENCODER.encode(message)


def decode_to_engine(frame: bytes) -> ToEngine:
    """Return a message of the front; the arrays of images and videos in it lie in ``frame``.

    Raises:
        DecodeError: It is none: an unknown name, a field too few or too many, or of another type.
    """
    message: ToEngine = _ENGINE_DECODER.decode(frame)
    return message


def decode_to_front(frame: bytes) -> ToFront:
    """Return a message of the engine process.

    Raises:
        DecodeError: It is none: an unknown name, a field too few or too many, or of another type.
    """
    message: ToFront = _FRONT_DECODER.decode(frame)
    return message
