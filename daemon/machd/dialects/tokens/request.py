"""Requests and answers of ``POST /tokenize`` and ``POST /detokenize``."""

from __future__ import annotations

from typing import Self

from msgspec import Struct

from machd.dialects.chat.messages import (
    ChatMessageList,
    check_final_message,
    check_messages,
    template_messages,
)
from machd.dialects.wire.bounds import ContentText, ModelName, TokenIds
from machd.dialects.wire.generation_request import check_token_ids
from machd.dialects.wire.reasoning import TemplateVariables, reasoning_options
from machd.dialects.wire.tools import ChatToolList, chat_tools
from machd.errors import InvalidRequestError, UnsupportedParameterError
from machd.request.conversation import Conversation
from machd.request.media import media_of


class TokenizeRequest(Struct, frozen=True, kw_only=True):
    """A text, or a conversation to be rendered first.

    Attributes:
        model: The served model when left out.
        prompt: The text; either this or ``messages``.
        messages: The conversation; either this or ``prompt``.
        add_special_tokens: Null means true for ``prompt`` and false for ``messages``, whose
            template writes the special tokens itself.
        tools: What the template is shown beside ``messages``.
        chat_template_kwargs: As of a chat completion.
        add_generation_prompt: Open the assistant's turn after ``messages``.
        continue_final_message: End where the last message's text does; not together with
            ``add_generation_prompt``.
        return_token_strs: Answer with each token's text too.
    """

    model: ModelName | None = None
    prompt: ContentText | None = None
    messages: ChatMessageList | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool | None = None
    tools: ChatToolList | None = None
    chat_template_kwargs: TemplateVariables | None = None
    return_token_strs: bool | None = None

    def checked(self) -> Self:
        """The request, once it holds one of ``prompt`` and ``messages``.

        Raises:
            InvalidRequestError: It holds both or neither, or the messages are not renderable.
            UnsupportedParameterError: A part of a message is of a kind that machd does not take.
        """
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequestError("send either prompt or messages", param="prompt")
        if self.messages is not None:
            check_messages(self.messages)
            if self.continue_final_message:
                check_final_message(self.messages, opens_turn=self.add_generation_prompt)
        return self

    @property
    def adds_special_tokens(self) -> bool:
        """``add_special_tokens`` with its default filled in."""
        if self.add_special_tokens is None:
            return self.prompt is not None
        return self.add_special_tokens

    @property
    def is_chat_prompt(self) -> bool:
        """True if a chat completion could have this very prompt."""
        is_open = self.add_generation_prompt or bool(self.continue_final_message)
        return self.messages is not None and is_open and not self.adds_special_tokens

    def conversation(self) -> Conversation:
        """The conversation; without messages for a ``prompt``.

        Raises:
            InvalidRequestError: The tools, the arguments of calls, an image or a video are not what
                they can be.
            UnsupportedParameterError: A template variable that machd does not pass on, or an image or
                a video in a prompt that no chat completion could have.
        """
        messages = template_messages(self.messages or [])
        if not self.is_chat_prompt and (media := media_of(messages)):
            raise UnsupportedParameterError.at(
                media[0].param,
                "images and videos are counted as a chat completion has them; leave out "
                "add_special_tokens and add_generation_prompt: false",
            )
        reasoning = reasoning_options(effort=None, variables=self.chat_template_kwargs, budgets={})
        return Conversation(
            messages=messages,
            tools=chat_tools(self.tools),
            thinks=reasoning.thinks,
            template_variables=reasoning.template_variables,
            continues_final_message=bool(self.continue_final_message),
        )


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
        """Raise InvalidRequestError if an id is outside the vocabulary."""
        check_token_ids(self.tokens, vocabulary_tokens=vocabulary_tokens, param="tokens")


class DetokenizeResponse(Struct, frozen=True, kw_only=True):
    """The text of the tokens."""

    prompt: str


class TokenizerInfoResponse(Struct, frozen=True, kw_only=True):
    """``GET /tokenizer_info`` in vLLM's shape, as far as the tokenizer tells.

    Attributes:
        tokenizer_class: Of the library's class that reads it.
        model_max_length: Positions that prompt and completion share, in tokens.
        chat_template: Jinja source; null for a model without a template.
        eos_token: Text of the token that ends a text. This and the others are null where the
            tokenizer has no such token.
    """

    tokenizer_class: str
    model_max_length: int
    chat_template: str | None
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
