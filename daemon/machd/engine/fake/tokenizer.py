"""A tokenizer whose tokens are bytes, for tiny models and scripted engines."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from machd.engine.protocol.chat_format import JSON_TOOL_MARKERS, JSON_TOOLS, ChatFormat
from machd.engine.protocol.fill_format import FillFormat, FillTokens
from machd.engine.protocol.tokenizer import ChatMessages, TokenizerInfo

END_OF_TEXT = 256
VOCABULARY_TOKENS = 257

FAKE_FILL_TOKENS = FillTokens(prefix=0xFD, suffix=0xFE, middle=0xFF)
"""Bytes that occur in no UTF-8, so that no text spells them."""

_CHAT_FORMAT = ChatFormat(
    tool_format=JSON_TOOLS,
    tool_markers=JSON_TOOL_MARKERS,
    shows_tools=True,
    reasoning_markers=("<think>", "</think>"),
)


class FakeTokenizer:
    """One token a byte, and one more that ends the text."""

    @property
    def vocabulary_tokens(self) -> int:
        """256 bytes and an end."""
        return VOCABULARY_TOKENS

    @property
    def special_token_ids(self) -> frozenset[int]:
        """The end."""
        return frozenset({END_OF_TEXT})

    @property
    def info(self) -> TokenizerInfo:
        """The end; conversations are rendered by code."""
        return TokenizerInfo(type(self).__name__, {"eos_token": "<end>"}, None)

    @property
    def knows_token_bytes(self) -> bool:
        """True: a token is a byte."""
        return True

    @property
    def has_chat_template(self) -> bool:
        """True."""
        return True

    @property
    def chat_template(self) -> None:
        """None: conversations are rendered by code."""

    @property
    def fill_format(self) -> FillFormat:
        """Prefix, suffix and middle."""
        return FillFormat(FAKE_FILL_TOKENS, lambda text: list(text.encode()))

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Encode to UTF-8 bytes; there is no special token to add."""
        del add_special_tokens
        return list(text.encode())

    def decode(self, token_ids: Sequence[int]) -> str:
        """Decode UTF-8 bytes."""
        return bytes(one for one in token_ids if one < END_OF_TEXT).decode("utf-8", "replace")

    @property
    def chat_format(self) -> ChatFormat:
        """Thoughts in ``<think>``, calls as JSON in ``<tool_call>``."""
        return _CHAT_FORMAT

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
        """Write a line for the tools, for each variable, and for each message and call; never a date."""
        del writes_date
        read = {**({"tools": list(tools)} if tools else {}), **variables}
        thinks = read.pop("enable_thinking", None)
        lines = [f"{name}: {json.dumps(value)}\n" for name, value in read.items()]
        lines += [line for message in messages for line in _lines_of(message)]
        text = "".join(lines)
        if continue_final_message:
            return text.removesuffix("\n")
        opening = "assistant: <think>" if thinks else "assistant: "
        return text + (opening if add_generation_prompt else "")

    def template_notes(self) -> tuple[str, ...]:
        """Return no warning: the template is code."""
        return ()

    def close(self) -> None:
        """Do nothing."""

    def token_bytes(self, token_id: int) -> bytes:
        """Return the byte."""
        return bytes([token_id]) if token_id < END_OF_TEXT else b"<end>"

    def detokenizer(self, *, keeps: Sequence[str] = ()) -> _FakeDetokenizer:
        """Make a UTF-8 decoder."""
        del keeps
        return _FakeDetokenizer()


def _lines_of(message: Mapping[str, object]) -> Iterator[str]:
    calls = message.get("tool_calls")
    content = message.get("content")
    if content is not None or not calls:
        yield f"{message['role']}: {message['content']}\n"
    for call in calls if isinstance(calls, list) else []:
        yield f"{message['role']} calls: {json.dumps(call['function'])}\n"


class _FakeDetokenizer:
    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        return self._decoder.decode(bytes([token_id])) if token_id < END_OF_TEXT else ""

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)
