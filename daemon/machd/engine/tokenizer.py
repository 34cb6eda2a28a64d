"""The model's tokenizer, safe to call from any thread."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from jinja2.exceptions import TemplateError

from machd.engine.detokenizer import ByteDetokenizer, WindowDetokenizer, decode_bytes
from machd.engine.protocol import ChatMessages, Detokenizer
from machd.engine.token_table import TokenForm, TokenTable
from machd.engine.untyped import Backend, WrappedTokenizer
from machd.errors import ChatTemplateMissingError, InvalidRequestError

__all__ = ["MlxTokenizer"]


class MlxTokenizer:
    """Wraps mlx-lm's ``TokenizerWrapper`` around a transformers tokenizer.

    A fast tokenizer is used through its Rust object, which threads may share; the Python layer
    around it raises "Already borrowed" when they do. A slow tokenizer is used under a lock.

    Args:
        wrapped: An ``mlx_lm.tokenizer_utils.TokenizerWrapper``.
        chat: Whether chat templates are served at all.

    Attributes:
        wrapped: The same object, for tool and reasoning formats.
    """

    def __init__(self, wrapped: WrappedTokenizer, *, chat: bool = True) -> None:
        self.wrapped = wrapped
        self._has_chat = chat and bool(wrapped.has_chat_template)
        self._lock = threading.Lock()
        self._backend = _shared_backend(wrapped)
        self._table = None if self._backend is None else TokenTable(self._backend)
        self._size_tokens = len(wrapped) if self._table is None else self._table.size_tokens

    @property
    def vocabulary_tokens(self) -> int:
        """One more than the highest id that has a text."""
        return self._size_tokens

    @property
    def has_chat_template(self) -> bool:
        """Whether :meth:`render_chat` can work."""
        return self._has_chat

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end a completion."""
        return frozenset(self.wrapped.eos_token_ids)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text.

        A rendered chat already holds its special tokens: encode it without adding them.
        """
        if self._backend is not None:
            # A batch of one: unlike `encode` it lets go of the GIL, and it works out no offsets.
            # A megabyte would otherwise stop every stream for half a second.
            (encoding,) = self._backend.encode_batch_fast(
                [text], add_special_tokens=add_special_tokens
            )
            return list(encoding.ids)
        with self._lock:
            return list(self.wrapped.encode(text, add_special_tokens=add_special_tokens))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, special tokens left out."""
        if self._table is not None and self._table.form is not TokenForm.OTHER:
            return decode_bytes(self._table, token_ids)
        return self._decode_whole(token_ids)

    def render_chat(self, messages: ChatMessages, *, add_generation_prompt: bool = True) -> str:
        """The prompt text of a conversation, rendered in transformers' sandbox.

        Raises:
            ChatTemplateMissingError: There is no template, or chat is switched off.
            InvalidRequestError: The template refuses the conversation; its own words are given.
        """
        if not self._has_chat:
            raise ChatTemplateMissingError(
                "this model has no chat template, so it takes prompts and no messages"
            )
        try:
            text = self.wrapped.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=add_generation_prompt
            )
        except TemplateError as error:
            raise InvalidRequestError(
                f"the model's chat template refuses these messages: {error.message or error}",
                param="messages",
            ) from error
        except (TypeError, ValueError, LookupError, AttributeError) as error:
            # A template is a program: content of a kind it does not expect fails anywhere in it.
            raise InvalidRequestError(
                f"the model's chat template cannot render these messages: {error}",
                param="messages",
            ) from error
        return str(text)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for; a special token's are those of its name."""
        if self._table is not None:
            return self._table.bytes_of(token_id)
        with self._lock:
            token = self.wrapped.convert_ids_to_tokens(token_id)
        return b"" if token is None else str(token).encode("utf-8")

    def detokenizer(self) -> Detokenizer:
        """A fresh detokenizer for one completion."""
        if self._table is not None and self._table.form is not TokenForm.OTHER:
            return ByteDetokenizer(self._table)
        return WindowDetokenizer(self._decode_whole)

    def _decode_whole(self, token_ids: Sequence[int]) -> str:
        if self._backend is not None:
            return str(self._backend.decode(list(token_ids), skip_special_tokens=True))
        with self._lock:
            return str(self.wrapped.decode(list(token_ids), skip_special_tokens=True))


def _shared_backend(wrapped: WrappedTokenizer) -> Backend | None:
    """The Rust tokenizer, or None where Python code stands between it and the text."""
    from mlx_lm.tokenizer_utils import NewlineTokenizer  # noqa: PLC0415 - imported by the loader

    inner = getattr(wrapped, "_tokenizer", wrapped)
    if isinstance(inner, NewlineTokenizer):
        return None
    return getattr(inner, "backend_tokenizer", None) if getattr(inner, "is_fast", False) else None
