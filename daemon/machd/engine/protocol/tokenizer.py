"""A tokenizer: text to token ids and back, safe from any thread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from machd.engine.protocol.chat_format import ChatFormat
from machd.engine.protocol.fill_format import FillFormat

ChatMessages = Sequence[dict[str, object]]
"""Chat messages as a template reads them: ``role``, ``content`` and further keys."""


class Detokenizer(Protocol):
    """An incremental decoder of one completion."""

    def push(self, token_id: int) -> str:
        """Return the text that is known with this token; empty inside a multi-byte character."""

    def finish(self) -> str:
        """Return the text that is still held back; incomplete bytes become U+FFFD."""


@dataclass(frozen=True, slots=True)
class TokenizerInfo:
    """A description of the tokenizer for clients.

    Attributes:
        class_name: Name of the library's class.
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
        """The highest id that has a text, plus one."""

    @property
    def special_token_ids(self) -> frozenset[int]:
        """Tokens that stand for no text."""

    @property
    def info(self) -> TokenizerInfo:
        """The special tokens and the chat template."""

    @property
    def knows_token_bytes(self) -> bool:
        """True if the :meth:`token_bytes` of a text's tokens, joined, are the text."""

    @property
    def has_chat_template(self) -> bool:
        """True if :meth:`render_chat` can work."""

    @property
    def chat_template(self) -> str | None:
        """The Jinja source of conversations; None where there is none."""

    @property
    def fill_format(self) -> FillFormat | None:
        """The format of fill-in-the-middle prompts; None for a model without them.

        The first access may take a second: use a worker thread.
        """

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Encode a text."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Decode token ids, special tokens left out."""

    @property
    def chat_format(self) -> ChatFormat:
        """The format of the model's thoughts and calls."""

    def render_chat(
        self,
        messages: ChatMessages,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, object]] = (),
        variables: Mapping[str, object] = MappingProxyType({}),
        writes_date: bool = True,
    ) -> str:
        """Render a conversation to prompt text.

        Args:
            messages: As in :class:`machd.request.conversation.Conversation`.
            add_generation_prompt: Whether the prompt ends where the assistant's answer begins.
            continue_final_message: Whether the prompt ends inside the last message, where its text
                stops; then ``add_generation_prompt`` has to be false.
            tools: As in OpenAI's chat completions.
            variables: Further variables of the template, such as ``enable_thinking``.
            writes_date: Whether a template that asks for the time of day or the date gets it; it gets an empty text otherwise.

        Raises:
            ChatTemplateMissingError: The model has no template.
            InvalidRequestError: The template refuses the conversation, or takes too much time,
                memory or text to render it.
            OverloadedError: The system has no room for the process that renders.
        """

    def template_notes(self) -> tuple[str, ...]:
        """Warn of a chat template that cannot be used."""

    def close(self) -> None:
        """Close the renderer of chat templates."""

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token, which need not be whole characters."""

    def detokenizer(self, *, keeps: Sequence[str] = ()) -> Detokenizer:
        """Make the detokenizer of one completion; ``keeps`` are decoded even where special tokens stand for them."""
