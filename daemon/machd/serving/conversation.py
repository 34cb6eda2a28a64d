"""From a conversation to what the engine is given and how its answer is read."""

from __future__ import annotations

from dataclasses import dataclass

from machd.api.conversation import Conversation
from machd.engine.protocol import Engine
from machd.serving.guidance import Guidance

__all__ = ["PreparedConversation", "prepare_conversation"]


@dataclass(frozen=True, slots=True)
class PreparedConversation:
    """A conversation, ready to be generated from.

    Attributes:
        prompt: Token ids.
        guidance: What shapes the answer, and how it is read.
    """

    prompt: tuple[int, ...]
    guidance: Guidance


def prepare_conversation(conversation: Conversation, engine: Engine) -> PreparedConversation:
    """Render, tokenise and compile; for a worker thread, as a prompt may be a megabyte.

    Raises:
        ChatTemplateMissingError: The model takes no conversations.
        GrammarError: A schema or grammar cannot be used.
        InvalidRequestError: The template refuses the conversation.
    """
    tokenizer = engine.tokenizer
    text = tokenizer.render_chat(conversation.messages)
    # The template writes the special tokens itself.
    prompt = tuple(tokenizer.encode(text, add_special_tokens=False))
    return PreparedConversation(prompt, Guidance())
