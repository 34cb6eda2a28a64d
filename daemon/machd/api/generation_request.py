"""What the body of every request for a generation has, whatever its dialect."""

from __future__ import annotations

from typing import Self

from msgspec import Struct

from machd.api.bounds import ModelName

__all__ = ["GenerationRequest"]


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
