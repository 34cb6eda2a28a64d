"""The bytes of each token."""

from __future__ import annotations

import json
import re
from enum import Enum

from machd.engine.backend.untyped import Backend

_SPACE = "\u2581"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenForm(Enum):
    """A spelling of tokens in a vocabulary."""

    BYTE_LEVEL = "byte_level"
    """Each character stands for one byte (GPT-2's table)."""
    SENTENCE_PIECE = "sentence_piece"
    """U+2581 is a space, ``<0xNN>`` a byte."""
    OTHER = "other"
    """Text that only the tokenizer's own decoder can join."""


class TokenTable:
    """Token ids to bytes, for a ``tokenizers.Tokenizer``; decoded once for each id.

    Attributes:
        form: As of the tokenizer's decoder.
        strips_first_space: Whether decoding drops one space at the very start.
        size_tokens: The highest id, plus one.
        special_token_ids: Tokens that are left out of decoded text.
    """

    def __init__(self, backend: Backend) -> None:
        steps = _decoder_steps(backend)
        kinds = [str(step.get("type")) for step in steps]
        self.form = _form(kinds)
        self.strips_first_space = self.form is TokenForm.SENTENCE_PIECE and "Strip" in kinds
        vocabulary: dict[str, int] = backend.get_vocab(with_added_tokens=True)
        self.size_tokens = max(vocabulary.values(), default=-1) + 1
        self._token_of = {index: token for token, index in vocabulary.items()}
        added = backend.get_added_tokens_decoder()
        self.special_token_ids: frozenset[int] = frozenset(
            index for index, token in added.items() if token.special
        )
        self._byte_of = _byte_of_character()
        # An id has one value only, so threads may write it twice.
        self._bytes_of: dict[int, bytes] = {}

    def bytes_of(self, token_id: int) -> bytes:
        """Return a token's bytes; a special token's are those of its name, an unknown id has none."""
        known = self._bytes_of.get(token_id)
        if known is None:
            token = self._token_of.get(token_id)
            known = b"" if token is None else self._decoded(token, token_id)
            self._bytes_of[token_id] = known
        return known

    def _decoded(self, token: str, token_id: int) -> bytes:
        if token_id in self.special_token_ids or self.form is TokenForm.OTHER:
            return token.encode("utf-8")
        if self.form is TokenForm.SENTENCE_PIECE:
            match = _BYTE_TOKEN.fullmatch(token)
            if match is not None:
                return bytes([int(match[1], 16)])
            return token.replace(_SPACE, " ").encode("utf-8")
        try:
            return bytes([self._byte_of[character] for character in token])
        except KeyError:
            # An added token, which is spelled as plain text.
            return token.encode("utf-8")


def _decoder_steps(backend: Backend) -> list[dict[str, object]]:
    if backend.decoder is None:
        return []
    state = json.loads(backend.decoder.__getstate__())
    return list(state.get("decoders", [state]))


def _form(kinds: list[str]) -> TokenForm:
    if kinds == ["ByteLevel"]:
        return TokenForm.BYTE_LEVEL
    if kinds[:3] == ["Replace", "ByteFallback", "Fuse"] and kinds[3:] in ([], ["Strip"]):
        return TokenForm.SENTENCE_PIECE
    return TokenForm.OTHER


def _byte_of_character() -> dict[str, int]:
    """Make GPT-2's table: printable Latin-1 stands for itself, other bytes for U+0100 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(256 + shift): byte for shift, byte in enumerate(others)})
    return table
