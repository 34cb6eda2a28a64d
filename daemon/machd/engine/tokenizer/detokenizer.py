"""Token ids to text while they come.

Two ways. Where a token's bytes are known on their own (byte-level BPE, SentencePiece), text is an
incremental UTF-8 decoding of them: exact, linear, and cheap. Elsewhere the tokenizer's own decoder
is asked about a short window of tokens.

Both hold text back only inside a character that later tokens may complete.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence

from machd.engine.tokenizer.token_table import TokenTable

_REPLACEMENT = "\ufffd"


class ByteDetokenizer:
    """Incremental UTF-8 over the bytes of tokens; special tokens give nothing.

    Args:
        table: Knows the bytes.
        keeps: Special tokens that give their names.
    """

    def __init__(self, table: TokenTable, *, keeps: frozenset[int] = frozenset()) -> None:
        self._table = table
        self._keeps = keeps
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._strips_space = table.strips_first_space

    def push(self, token_id: int) -> str:
        """The text that became certain with this token."""
        if self._table.is_special(token_id) and token_id not in self._keeps:
            return ""
        text = self._decoder.decode(self._table.bytes_of(token_id))
        return self._without_first_space(text)

    def finish(self) -> str:
        """What is still held back; incomplete bytes become U+FFFD."""
        return self._without_first_space(self._decoder.decode(b"", final=True))

    def _without_first_space(self, text: str) -> str:
        if text and self._strips_space:
            self._strips_space = False
            return text.removeprefix(" ")
        return text


class WindowDetokenizer:
    """Asks a decoder about the tokens since the last certain text.

    Args:
        decode: The tokenizer's own decoding, less the special tokens that are not to be seen.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._all: list[int] = []
        self._window_start = 0
        self._certain_end = 0
        self._emitted = ""

    def push(self, token_id: int) -> str:
        """The text that became certain with this token."""
        self._all.append(token_id)
        known = self._decode(self._all[self._window_start : self._certain_end])
        text = self._decode(self._all[self._window_start :])
        if len(text) <= len(known) or text.endswith(_REPLACEMENT) or not text.startswith(known):
            return ""
        # The last certain tokens stay in the window: decoders join words by looking back.
        self._window_start = self._certain_end
        self._certain_end = len(self._all)
        new = text[len(known) :]
        self._emitted += new
        return new

    def finish(self) -> str:
        """What is still held back; incomplete bytes become U+FFFD."""
        whole = self._decode(self._all)
        if whole.startswith(self._emitted):
            return whole[len(self._emitted) :]
        window = self._all[self._window_start :]
        known = self._decode(window[: self._certain_end - self._window_start])
        return self._decode(window).removeprefix(known)


def decode_bytes(table: TokenTable, token_ids: Sequence[int]) -> str:
    """Text of token ids, special tokens left out: what a :class:`ByteDetokenizer` gives in all."""
    data = b"".join(table.bytes_of(index) for index in token_ids if not table.is_special(index))
    text = data.decode("utf-8", errors="replace")
    return text.removeprefix(" ") if table.strips_first_space else text
