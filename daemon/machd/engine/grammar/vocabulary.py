"""A model's tokens as llguidance reads them, in this process or in one beside it."""

from __future__ import annotations

from collections.abc import Callable, Collection

import msgspec
from llguidance import LLTokenizer, TokenizerWrapper

from machd.engine.protocol.tokenizer import Tokenizer


class Vocabulary(msgspec.Struct, frozen=True):
    """The bytes of every token.

    Attributes:
        tokens: One for each logit; empty for a token that is never allowed.
        eos_token_ids: Tokens that end a text, sorted; one at least.
    """

    tokens: tuple[bytes, ...]
    special_token_ids: tuple[int, ...]
    eos_token_ids: tuple[int, ...]

    @classmethod
    def of(cls, tokenizer: Tokenizer, size: int, eos_token_ids: Collection[int]) -> Vocabulary:
        """Read a tokenizer's; ``size`` is the width of the logits, which may be wider."""
        named = min(size, tokenizer.vocabulary_tokens)
        tokens = [tokenizer.token_bytes(token_id) for token_id in range(named)]
        special = tuple(one for one in tokenizer.special_token_ids if one < size)
        padding = [b""] * (size - named)
        return cls((*tokens, *padding), special, tuple(sorted(eos_token_ids)))

    def bound(self, encode: Callable[[str], list[int]]) -> LLTokenizer:
        """Make llguidance's tokenizer of it; ``encode`` tokenises forced text as the model's does."""
        wrapper = TokenizerWrapper(_Tokens(self, encode))
        return LLTokenizer(wrapper, n_vocab=len(self.tokens), eos_token=list(self.eos_token_ids))


class _Tokens:
    """What llguidance asks of a tokenizer."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary, encode: Callable[[str], list[int]]) -> None:
        self.eos_token_id = vocabulary.eos_token_ids[0]
        self.tokens = vocabulary.tokens
        self.special_token_ids = vocabulary.special_token_ids
        self._encode = encode

    def __call__(self, text: bytes | str) -> list[int]:
        return self._encode(text.decode("utf-8", "replace") if isinstance(text, bytes) else text)
