"""What others ask of a tokenizer: text to token ids and back, safe from any thread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from machd.engine.protocol.chat_format import ChatFormat
from machd.engine.protocol.fill_format import FillFormat

ChatMessages = Sequence[dict[str, object]]
"""Chat messages as a template sees them: ``role``, ``content`` and what else the template reads."""


class Detokenizer(Protocol):
    """Turns one completion's token ids into text as they come."""

    def push(self, token_id: int) -> str:
        """The text that became certain with this token; empty inside a multi-byte character."""
        ...

    def finish(self) -> str:
        """The text still held back; incomplete bytes become U+FFFD."""
        ...


@dataclass(frozen=True, slots=True)
class TokenizerInfo:
    """What a client needs to use the tokenizer from afar.

    Attributes:
        class_name: Of the library's class that reads the tokenizer.
        special_tokens: Role, such as ``eos_token``, to the token's text.
        chat_template: Jinja source of the default template; None where there is none.
    """

    class_name: str
    special_tokens: Mapping[str, str]
    chat_template: str | None


class Tokenizer(Protocol):
    """Text to ids and back. Every method may be called from any thread."""

    @property
    def vocabulary_tokens(self) -> int:
        """Ids that text can come from: 0 up to this number, not included."""
        ...

    @property
    def special_token_ids(self) -> frozenset[int]:
        """Tokens that stand for no text."""
        ...

    @property
    def info(self) -> TokenizerInfo:
        """The special tokens and the chat template."""
        ...

    @property
    def knows_token_bytes(self) -> bool:
        """Whether :meth:`token_bytes` tells all: put together they are the text."""
        ...

    @property
    def has_chat_template(self) -> bool:
        """Whether :meth:`render_chat` can work."""
        ...

    @property
    def chat_template(self) -> str | None:
        """The Jinja source of conversations; None where there is none."""
        ...

    @property
    def fill_format(self) -> FillFormat | None:
        """How the model is asked for the text between two texts; None where it cannot be.

        Working it out may take a second the first time: ask on a worker thread.
        """
        ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, special tokens left out."""
        ...

    @property
    def chat_format(self) -> ChatFormat:
        """How the model writes thoughts and calls."""
        ...

    def render_chat(
        self,
        messages: ChatMessages,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, object]] = (),
        variables: Mapping[str, object] = MappingProxyType({}),
    ) -> str:
        """The prompt text of a conversation.

        Args:
            messages: As :class:`machd.api.conversation.Conversation` has them.
            add_generation_prompt: End where the assistant's answer begins.
            continue_final_message: End inside the last message, where its text stops; then
                ``add_generation_prompt`` has to be false.
            tools: As OpenAI's chat completions write them.
            variables: What else the template reads, such as ``enable_thinking``.

        Raises:
            ChatTemplateMissingError: The model has no template.
            InvalidRequestError: The template refuses the conversation, or takes too much of time,
                memory or text to render it.
        """
        ...

    def template_notes(self) -> tuple[str, ...]:
        """What a person should know of the chat template before the first conversation comes."""
        ...

    def close(self) -> None:
        """Let go of what renders the chat template."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for, which need not be whole characters."""
        ...

    def detokenizer(self, *, keeps: Sequence[str] = ()) -> Detokenizer:
        """A fresh detokenizer for one completion.

        Args:
            keeps: Texts that come out even if they are special tokens, which others are left out.
        """
        ...
