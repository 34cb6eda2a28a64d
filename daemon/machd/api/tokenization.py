"""What ``POST /tokenize`` and ``POST /detokenize`` take and answer."""

from __future__ import annotations

from typing import Self

from msgspec import Struct

from machd.api.bounds import ContentText, ModelName, TokenIds
from machd.api.messages import ChatMessageList, check_messages, template_messages
from machd.api.token_ids import check_token_ids
from machd.errors import InvalidRequestError

__all__ = ["DetokenizeRequest", "DetokenizeResponse", "TokenizeRequest", "TokenizeResponse"]


class TokenizeRequest(Struct, frozen=True, kw_only=True):
    """A text, or a conversation to be rendered first.

    Attributes:
        model: The served model when left out.
        prompt: The text; either this or ``messages``.
        messages: The conversation; either this or ``prompt``.
        add_special_tokens: Null means true for ``prompt`` and false for ``messages``, whose
            template writes the special tokens itself.
        add_generation_prompt: Open the assistant's turn after ``messages``.
        return_token_strs: Answer with each token's text too.
    """

    model: ModelName | None = None
    prompt: ContentText | None = None
    messages: ChatMessageList | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    return_token_strs: bool | None = None

    def checked(self) -> Self:
        """The request, once it holds one of ``prompt`` and ``messages``.

        Raises:
            InvalidRequestError: It holds both or neither, or the messages are not renderable.
        """
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequestError("send either prompt or messages", param="prompt")
        if self.messages is not None:
            check_messages(self.messages)
        return self

    @property
    def adds_special_tokens(self) -> bool:
        """``add_special_tokens`` with its default filled in."""
        if self.add_special_tokens is None:
            return self.prompt is not None
        return self.add_special_tokens

    def template_messages(self) -> list[dict[str, object]]:
        """The conversation as a chat template sees it; empty for a ``prompt``."""
        return template_messages(self.messages or [])


class TokenizeResponse(Struct, frozen=True, kw_only=True):
    """The tokens.

    Attributes:
        count: How many they are.
        max_model_len: Positions that prompt and completion share, in tokens.
        token_strs: Each token's text; null unless asked for.
    """

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(Struct, frozen=True, kw_only=True):
    """Token ids. ``model`` is the served model when left out."""

    model: ModelName | None = None
    tokens: TokenIds

    def check_vocabulary(self, vocabulary_tokens: int) -> None:
        """Hold the ids against the model's.

        Raises:
            InvalidRequestError: An id is outside the vocabulary.
        """
        check_token_ids(self.tokens, vocabulary_tokens=vocabulary_tokens, param="tokens")


class DetokenizeResponse(Struct, frozen=True, kw_only=True):
    """The text of the tokens."""

    prompt: str
