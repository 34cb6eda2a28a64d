"""Incremental decoding of token ids to text.

Where a token's bytes are known on their own (byte-level BPE, SentencePiece), text is an incremental
UTF-8 decoding of them: exact, linear and cheap. Elsewhere the tokenizer's own decoder decodes a short
window of tokens. Both hold text back only inside a character that later tokens may complete.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence

from machd.engine.tokenizer.token_table import TokenTable

_REPLACEMENT = "\ufffd"


class ByteDetokenizer:
    """Incremental UTF-8 over the bytes of tokens; special tokens outside of ``keeps`` give nothing."""

    def __init__(self, table: TokenTable, *, keeps: frozenset[int] = frozenset()) -> None:
        self._table = table
        self._dropped = table.special_token_ids - keeps
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._strips_space = table.strips_first_space

    def push(self, token_id: int) -> str:
        """Return the text that is known with this token."""
        if token_id in self._dropped:
            return ""
        text = self._decoder.decode(self._table.bytes_of(token_id))
        return self._without_first_space(text)

    def finish(self) -> str:
        """Return the text that is still held back; incomplete bytes become U+FFFD."""
        return self._without_first_space(self._decoder.decode(b"", final=True))

    def _without_first_space(self, text: str) -> str:
        if text and self._strips_space:
            self._strips_space = False
            return text.removeprefix(" ")
        return text


class WindowDetokenizer:
    """A window of tokens under the tokenizer's own ``decode``, which leaves special tokens out."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._all: list[int] = []
        self._window_start = 0
        self._decoded_end = 0
        self._emitted = ""

    def push(self, token_id: int) -> str:
        """Return the text that is known with this token."""
        self._all.append(token_id)
        known = self._decode(self._all[self._window_start : self._decoded_end])
        text = self._decode(self._all[self._window_start :])
        if len(text) <= len(known) or text.endswith(_REPLACEMENT) or not text.startswith(known):
            return ""
        # The last decoded tokens stay in the window: decoders join words by looking back.
        self._window_start = self._decoded_end
        self._decoded_end = len(self._all)
        new = text[len(known) :]
        self._emitted += new
        return new

    def finish(self) -> str:
        """Return the text that is still held back; incomplete bytes become U+FFFD."""
        whole = self._decode(self._all)
        if whole.startswith(self._emitted):
            return whole[len(self._emitted) :]
        window = self._all[self._window_start :]
        known = self._decode(window[: self._decoded_end - self._window_start])
        return self._decode(window).removeprefix(known)


def decode_bytes(table: TokenTable, token_ids: Sequence[int]) -> str:
    """Decode token ids to the text that a :class:`ByteDetokenizer` gives in all."""
    special = table.special_token_ids
    data = b"".join(table.bytes_of(one) for one in token_ids if one not in special)
    text = data.decode("utf-8", errors="replace")
    return text.removeprefix(" ") if table.strips_first_space else text
