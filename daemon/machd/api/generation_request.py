"""What the body of every request for a generation has, whatever its dialect."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self, TypeVar

from msgspec import Struct

from machd.api.bounds import WHOLE_ROOM, ModelName
from machd.errors import InvalidRequestError

_T = TypeVar("_T")


class GenerationRequest(Struct, frozen=True, kw_only=True):
    """A request for a generation; dialects derive theirs from it.

    Attributes:
        model: May be left out where every name is accepted.
    """

    model: ModelName | None = None

    def checked(self) -> Self:
        """The request, once what no single field's bounds can say holds too.

        Raises:
            InvalidRequestError: Fields contradict each other.
            UnsupportedParameterError: A field asks for what machd does not do.
        """
        return self

    def check_vocabulary(self, vocabulary_tokens: int) -> None:
        """Hold the token ids that the request names, if any, against the model's.

        Raises:
            InvalidRequestError: An id is outside the vocabulary.
        """


def agreed(asked: Mapping[str, _T | None]) -> _T | None:
    """The one value that several spellings of a field have, if any.

    Args:
        asked: Field to its value; None where it is not given.

    Raises:
        InvalidRequestError: Two of them differ.
    """
    given = {name: value for name, value in asked.items() if value is not None}
    first = next(iter(given), None)
    for name, value in given.items():
        if first is not None and value != given[first]:
            raise InvalidRequestError(f"{first} and {name} contradict each other", param=name)
    return None if first is None else given[first]


def agreed_tokens(asked: Mapping[str, int | None], *, least: int = 1) -> int | None:
    """The number of tokens that a request asks for, whichever field says so.

    Args:
        asked: Field to its value, inside ``bounds.MaxTokens``.
        least: The smallest number that makes sense here.

    Raises:
        InvalidRequestError: Two fields differ, or one is 0 where that makes no sense.
    """
    for name, value in asked.items():
        if value is not None and value != WHOLE_ROOM and value < least:
            raise InvalidRequestError(
                f"{name}: expected at least {least}, or {WHOLE_ROOM} for all that fits", param=name
            )
    return agreed(asked)


def given_or(value: float | None, default: float) -> float:
    """A number that a client gave, or what null means."""
    return default if value is None else value
