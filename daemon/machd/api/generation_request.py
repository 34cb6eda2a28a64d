"""What the body of every request for a generation has, whatever its dialect."""

from __future__ import annotations

from typing import Self

from msgspec import Struct

from machd.api.bounds import ModelName
from machd.errors import InvalidRequestError

__all__ = ["GenerationRequest", "check_stream_options", "given_or"]


class GenerationRequest(Struct, frozen=True, kw_only=True):
    """A request for a generation; dialects derive theirs from it."""

    model: ModelName

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


def check_stream_options(options: Struct | None, *, is_stream: bool | None) -> None:
    """Refuse ``stream_options`` on an answer that is not streamed.

    Raises:
        InvalidRequestError: They are given and ``stream`` is not true.
    """
    if options is not None and not is_stream:
        raise InvalidRequestError(
            "stream_options is only allowed together with stream: true", param="stream_options"
        )


def given_or(value: float | None, default: float) -> float:
    """A number that a client gave, or what null means."""
    return default if value is None else value
