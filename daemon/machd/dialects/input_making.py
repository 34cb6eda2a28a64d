"""Texts and pairs of a request to the inputs of an encoder, with errors that name their fields. For worker threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from machd.engine.protocol.encoder import EncoderInput, InputTokenizer
from machd.engine.protocol.tokenizer import Tokenizer
from machd.errors import InvalidRequestError

_T = TypeVar("_T")


def make_inputs(
    tokenizer: InputTokenizer,
    *,
    inputs: Sequence[str | list[int]],
    prompt: str,
    truncates: bool,
    param: str,
) -> list[EncoderInput]:
    """Tokenise texts, with the prompt before each, or take over token ids.

    Raises:
        ContextLengthExceededError: One is too long, and is not to be cut.
        InvalidRequestError: A text cannot be encoded, or has no token; or token ids are not those of a whole text.
    """
    ids = [one for one in inputs if isinstance(one, list)]
    if ids:
        return _named(lambda some: tokenizer.take(some, truncates=truncates), ids, param)
    texts = [prompt + one for one in inputs if isinstance(one, str)]
    return _named(lambda some: tokenizer.encode(some, truncates=truncates), texts, param)


def make_pairs(
    tokenizer: InputTokenizer,
    *,
    pairs: Sequence[tuple[str, str]],
    truncates: bool,
    param: str,
) -> list[EncoderInput]:
    """Tokenise pairs of texts.

    Raises:
        ContextLengthExceededError: One is too long, and is not to be cut.
        InvalidRequestError: A text cannot be encoded.
    """
    return _named(lambda some: tokenizer.encode_pairs(some, truncates=truncates), pairs, param)


def beginning(tokenizer: Tokenizer, text: str, max_tokens: int) -> str:
    """Return the longest beginning of a text that has so many tokens at most, special tokens not counted."""

    def fits(characters: int) -> bool:
        return len(tokenizer.encode(text[:characters], add_special_tokens=False)) <= max_tokens

    # Doubled from below, so that the work is that of the beginning and not of the text.
    fitting, too_long = 0, max_tokens
    while too_long < len(text) and fits(too_long):
        fitting, too_long = too_long, 2 * too_long
    if too_long >= len(text):
        if fits(len(text)):
            return text
        too_long = len(text)
    while too_long - fitting > 1:
        middle = (fitting + too_long) // 2
        fitting, too_long = (middle, too_long) if fits(middle) else (fitting, middle)
    return text[:fitting]


def _named(
    encode: Callable[[Sequence[_T]], list[EncoderInput]], texts: Sequence[_T], param: str
) -> list[EncoderInput]:
    """Encode texts, and name the one that cannot be."""
    try:
        return encode(texts)
    except InvalidRequestError:
        for index, one in enumerate(texts):
            try:
                encode([one])
            except InvalidRequestError as error:
                error.param = f"{param}[{index}]" if len(texts) > 1 else param
                raise
        raise
