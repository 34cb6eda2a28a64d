"""Fields that would change the answer in a way that machd does not support.

Ignoring one would answer another question than the one that was asked, so such a field is refused
by name. Its annotation lists the values that ask for nothing; the OpenAPI schema shows them and
:func:`neutral_values` reads them, so that the two cannot differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Annotated, TypeAlias, get_type_hints

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from machd.errors import UnsupportedParameterError

_REFUSED = "Not supported: any other value is answered with 400."

_MAX_NEUTRAL_BYTES = 512
"""No value that asks for nothing is longer, however it is laid out; longer ones go unread."""


def only(*values: object) -> Meta:
    """Mark a raw field: besides null and emptiness, these values alone are accepted."""
    return Meta(
        description=_REFUSED,
        extra_json_schema={"enum": [None, [], {}, *values]},
        # typing keeps one Annotated for all that are equal, and 1 == True: their texts differ.
        extra={"values": repr(values)},
    )


Refused: TypeAlias = Annotated[Raw | UnsetType, only()]
"""A field of another server or of OpenAI's that is refused unless null or empty."""

Ignored: TypeAlias = Annotated[
    Raw | UnsetType, Meta(description="Accepted; does not change the answer.")
]
"""A field that is known, of any shape, and does not change the answer."""


@cache
def neutral_values(body_type: type[Struct]) -> Mapping[str, tuple[object, ...]]:
    """Each refused field of a type, with the values that ask for nothing."""
    hints = get_type_hints(body_type, include_extras=True)
    return MappingProxyType(
        {
            name: tuple(mark.extra_json_schema["enum"])
            for name in body_type.__struct_fields__
            for mark in getattr(hints[name], "__metadata__", ())
            if isinstance(mark, Meta)
            and mark.description == _REFUSED
            and mark.extra_json_schema is not None
        }
    )


def refuse_unsupported(body: Struct, *, where: str = "") -> None:
    """Raise UnsupportedParameterError, with the field as ``param``, if a refused field asks for something.

    ``where`` is the struct's path in the request, such as ``messages[2].``.
    """
    for name, values in neutral_values(type(body)).items():
        value = getattr(body, name)
        if value is not UNSET and not _is_among(value, values):
            raise UnsupportedParameterError(
                f"{where}{name} is not supported{_hint(values)}", param=f"{where}{name}"
            )


def _is_among(value: Raw, neutral: tuple[object, ...]) -> bool:
    raw = memoryview(value)
    if raw.nbytes > _MAX_NEUTRAL_BYTES:
        return False
    try:
        decoded = msgspec.json.decode(raw)
    except msgspec.DecodeError:  # a value that is skipped may be one that cannot be read: 1e999
        return False
    # The types are compared too: in Python, 0 == False.
    return any(type(decoded) is type(one) and decoded == one for one in neutral)


def _hint(neutral: tuple[object, ...]) -> str:
    named = [msgspec.json.encode(one).decode() for one in neutral if one not in (None, [], {})]
    return f"; leave it out or send {' or '.join(named)}" if named else "; leave it out"
