"""The scripted engine's tokenizer: a token is a byte."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from machd.engine.protocol import ChatMessages

__all__ = ["END_OF_TEXT", "VOCABULARY_TOKENS", "FakeTokenizer"]

END_OF_TEXT = 256
VOCABULARY_TOKENS = 257


class FakeTokenizer:
    """One token a byte, and one more that ends the text."""

    @property
    def vocabulary_tokens(self) -> int:
        """256 bytes and an end."""
        return VOCABULARY_TOKENS

    @property
    def has_chat_template(self) -> bool:
        """Always."""
        return True

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """UTF-8 bytes; there is nothing special to add."""
        del add_special_tokens
        return list(text.encode())

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of those bytes."""
        return bytes(one for one in token_ids if one < END_OF_TEXT).decode("utf-8", "replace")

    def render_chat(self, messages: ChatMessages, *, add_generation_prompt: bool = True) -> str:
        """A line a message."""
        lines = [f"{message['role']}: {message['content']}\n" for message in messages]
        return "".join([*lines, "assistant: " if add_generation_prompt else ""])

    def token_bytes(self, token_id: int) -> bytes:
        """The byte itself."""
        return bytes([token_id]) if token_id < END_OF_TEXT else b"<end>"

    def detokenizer(self) -> _FakeDetokenizer:
        """A fresh one."""
        return _FakeDetokenizer()


class _FakeDetokenizer:
    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        return self._decoder.decode(bytes([token_id])) if token_id < END_OF_TEXT else ""

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)
