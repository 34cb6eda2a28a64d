"""Texts to the inputs of an encoder, by the tokenizer of its checkpoint; without mlx."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from machd.engine.backend.inspection_bounds import printable
from machd.engine.backend.model_files import NO_CHAT, check_tokenizer_files
from machd.engine.encoding.encoder_files import EncoderFiles
from machd.engine.loading.tokenizer_files import check_growth, directory_tokenizer
from machd.engine.protocol.encoder import EncoderInput
from machd.engine.tokenizer.tokenizer import MlxTokenizer
from machd.errors import (
    ContextLengthExceededError,
    InvalidRequestError,
    ModelFormatError,
    ModelNotFoundError,
)
from machd.panics import ENDINGS

if TYPE_CHECKING:
    from tokenizers import Encoding

_FILE = "tokenizer.json"
_ANY_TEXT = "a"


def open_inputs(files: EncoderFiles) -> TextInputTokenizer:
    """Open the tokenizer of an encoder's checkpoint.

    Raises:
        ModelNotFoundError: There is no ``tokenizer.json``.
        ModelFormatError: It cannot be read, or is out of bounds.
    """
    return TextInputTokenizer(
        files.checkpoint.path,
        max_input_tokens=files.description.max_input_tokens,
        lowercases=files.lowercases,
        strips=files.strips,
    )


def encoder_tokenizer(files: EncoderFiles) -> MlxTokenizer:
    """Open the same tokenizer as clients see it who ask for a text's tokens.

    Raises:
        ModelError: One of its kinds; see :func:`machd.engine.loading.tokenizer_files.directory_tokenizer`.
    """
    tokenizer = directory_tokenizer(files.checkpoint, NO_CHAT, trust_remote_code=False)
    tokenizer.start_renderer()
    return tokenizer


class TextInputTokenizer:
    """Satisfies :class:`machd.engine.protocol.encoder.InputTokenizer`."""

    def __init__(
        self, directory: Path, *, max_input_tokens: int, lowercases: bool, strips: bool
    ) -> None:
        """Read ``tokenizer.json`` of a checkpoint.

        Args:
            directory: The checkpoint's.
            max_input_tokens: Special tokens included.
            lowercases: Whether texts are put into lower case first, besides what the tokenizer does.
            strips: Whether white space around a text is taken away first.

        Raises:
            ModelNotFoundError: There is no such file.
            ModelFormatError: It cannot be read, or is out of bounds.
        """
        from tokenizers import Tokenizer  # noqa: PLC0415 - slow to import

        check_tokenizer_files(directory)
        path = directory / _FILE
        if not path.is_file():
            raise ModelNotFoundError(
                f"{directory.name} holds no {_FILE}; save the tokenizer with transformers' save_pretrained()"
            )
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except ENDINGS:
            raise
        except (
            BaseException
        ) as error:  # tokenizers raises errors of any kind, and a panic is no Exception
            raise ModelFormatError(
                f"{_FILE} of {directory.name} cannot be read: {printable(error)}"
            ) from error
        check_growth(self._tokenizer, directory.name)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._max_tokens = max_input_tokens
        self._lowercases = lowercases
        self._strips = strips

    def encode(self, texts: Sequence[str], *, truncates: bool) -> list[EncoderInput]:
        """Encode texts; see :meth:`machd.engine.protocol.encoder.InputTokenizer.encode`."""
        room = self._room(is_pair=False)
        inputs = list[EncoderInput]()
        for text in texts:
            tokens = self._tokens(text)
            if len(tokens) > room:
                self._check_cut(len(tokens) + self._max_tokens - room, truncates=truncates)
                tokens.truncate(room)
            inputs.append(_input(self._tokenizer.post_process(tokens)))
        return inputs

    def take(self, token_ids: Sequence[Sequence[int]], *, truncates: bool) -> list[EncoderInput]:
        """Take over encoded texts; see :meth:`machd.engine.protocol.encoder.InputTokenizer.take`."""
        first, last = self._special_ids()
        inputs = list[EncoderInput]()
        for given in token_ids:
            ids = tuple(given)
            # Ids of another tokenizer are in the vocabulary of a large one, and mean other words there.
            if ids[: len(first)] != first or ids[len(ids) - len(last) :] != last:
                raise InvalidRequestError(
                    f"token ids of this model begin with {list(first)} and end with {list(last)}, as POST /tokenize gives "
                    "them; send texts, which LangChain does with check_embedding_ctx_length=False"
                )
            if len(ids) > self._max_tokens:
                self._check_cut(len(ids), truncates=truncates)
                ids = ids[: self._max_tokens - len(last)] + last
            inputs.append(EncoderInput(ids))
        return inputs

    def encode_pairs(
        self, pairs: Sequence[tuple[str, str]], *, truncates: bool
    ) -> list[EncoderInput]:
        """Encode pairs; see :meth:`machd.engine.protocol.encoder.InputTokenizer.encode_pairs`."""
        room = self._room(is_pair=True)
        first_texts: dict[str, Encoding] = {}
        inputs = list[EncoderInput]()
        for one, other in pairs:
            # A query stands before many documents.
            first = first_texts.get(one) or first_texts.setdefault(one, self._tokens(one))
            second = self._tokens(other)
            whole_tokens = len(first) + len(second)
            if whole_tokens > room:
                self._check_cut(whole_tokens + self._max_tokens - room, truncates=truncates)
                first_tokens, second_tokens = cut_longest(len(first), len(second), room)
                if first_tokens < len(first):
                    first = self._tokens(one)  # the other pairs keep theirs
                    first.truncate(first_tokens)
                second.truncate(second_tokens)
            inputs.append(_input(self._tokenizer.post_process(first, second)))
        return inputs

    def _special_ids(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the special tokens before and behind every text."""
        encoded = self._tokenizer.post_process(self._tokens(_ANY_TEXT))
        is_of_text = [not one for one in encoded.special_tokens_mask]
        if True not in is_of_text:
            return (), ()
        first, last = is_of_text.index(True), is_of_text[::-1].index(True)
        return tuple(encoded.ids[:first]), tuple(encoded.ids[len(encoded.ids) - last :])

    def _room(self, *, is_pair: bool) -> int:
        """Return the most tokens of texts, special ones not counted."""
        return self._max_tokens - self._tokenizer.num_special_tokens_to_add(is_pair)

    def _tokens(self, text: str) -> Encoding:
        if self._strips:
            text = text.strip()
        if self._lowercases:
            text = text.lower()
        try:
            return self._tokenizer.encode(text, add_special_tokens=False)
        except ENDINGS:
            raise
        except (
            BaseException
        ) as error:  # of any kind: a text that the tokenizer does not know a way for
            raise InvalidRequestError("the model's tokenizer cannot encode this text") from error

    def _check_cut(self, tokens: int, *, truncates: bool) -> None:
        if not truncates:
            raise ContextLengthExceededError(
                context_tokens=self._max_tokens, prompt_tokens=tokens, asked_tokens=0, param="input"
            )


def cut_longest(first: int, second: int, room: int) -> tuple[int, int]:
    """Return how many tokens of two texts are left where the longer one loses its last token again and again."""
    half = room // 2
    if first <= half:
        return first, room - first
    if second <= half:
        return room - second, second
    return room - half, half


def _input(encoded: Encoding) -> EncoderInput:
    if not encoded.ids:
        raise InvalidRequestError("an input has no token: the model reads no empty text")
    second = next((place for place, kind in enumerate(encoded.type_ids) if kind), None)
    return EncoderInput(tuple(encoded.ids), second)
