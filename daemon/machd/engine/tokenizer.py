"""The model's tokenizer, safe to call from any thread."""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from jinja2.exceptions import TemplateError

from machd.engine.chat_format import MarkedChatFormat, read_chat_format
from machd.engine.detokenizer import ByteDetokenizer, WindowDetokenizer, decode_bytes
from machd.engine.protocol import ChatMessages, Detokenizer
from machd.engine.template_probe import MARK, TOOL, USER
from machd.engine.token_table import TokenForm, TokenTable
from machd.engine.untyped import Backend, WrappedTokenizer
from machd.errors import ChatTemplateMissingError, InvalidRequestError, MachdError

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
    def special_token_ids(self) -> frozenset[int]:
        """Tokens that stand for no text."""
        if self._table is not None:
            return self._table.special_token_ids
        return frozenset(self.wrapped.all_special_ids)

    @property
    def knows_token_bytes(self) -> bool:
        """Whether :meth:`token_bytes` tells all: put together they are the text."""
        return self._table is not None and self._table.form is not TokenForm.OTHER

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
        if self._table is not None and self.knows_token_bytes:
            return decode_bytes(self._table, token_ids)
        return self._decode_whole(token_ids)

    @functools.cached_property
    def chat_format(self) -> MarkedChatFormat:
        """How the model writes thoughts and calls; a few words are rendered to find out."""
        shown = self._rendered_quietly(tools=[TOOL])
        thinking = self._rendered_quietly(variables={"enable_thinking": True})
        return read_chat_format(
            self.wrapped,
            shows_tools=shown is not None and MARK in shown,
            has_reasoning_switch=(
                thinking is not None
                and thinking != self._rendered_quietly(variables={"enable_thinking": False})
            ),
        )

    def _rendered_quietly(
        self,
        tools: Sequence[Mapping[str, object]] = (),
        variables: Mapping[str, object] = MappingProxyType({}),
    ) -> str | None:
        try:
            return self.render_chat([USER], tools=tools, variables=variables)
        except MachdError:
            return None

    def render_chat(
        self,
        messages: ChatMessages,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, object]] = (),
        variables: Mapping[str, object] = MappingProxyType({}),
    ) -> str:
        """The prompt text of a conversation, rendered in transformers' sandbox.

        Raises:
            ChatTemplateMissingError: There is no template, or chat is switched off.
            InvalidRequestError: The template refuses the conversation; its own words are given.
        """
        if not self._has_chat:
            raise ChatTemplateMissingError(
                "this model has no chat template, so it takes prompts and no messages"
            )
        assert not (add_generation_prompt and continue_final_message), "one end or the other"
        read: dict[str, object] = dict(variables)
        if tools:
            read["tools"] = [dict(tool) for tool in tools]
        if continue_final_message:
            read["continue_final_message"] = True
        try:
            text = self.wrapped.apply_chat_template(
                self._as_rendered(messages),
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **read,
            )
        except Exception as error:
            refusal = _refusal(error, continues=continue_final_message)
            if refusal is None:
                raise
            raise refusal from error
        return str(text)

    def _as_rendered(self, messages: ChatMessages) -> list[dict[str, object]]:
        """Templates read the arguments of calls as objects; mlx-lm's own renderers, as JSON text."""
        if getattr(self.wrapped, "_chat_template", None) is None:
            return list(messages)
        return [_with_arguments_as_text(message) for message in messages]

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for; a special token's are those of its name."""
        if self._table is not None:
            return self._table.bytes_of(token_id)
        with self._lock:
            token = self.wrapped.convert_ids_to_tokens(token_id)
        return b"" if token is None else str(token).encode("utf-8")

    def detokenizer(self, *, keeps: Sequence[str] = ()) -> Detokenizer:
        """A fresh detokenizer for one completion.

        Args:
            keeps: Texts that come out even where special tokens stand for them, or for parts.
        """
        used = {one for text in keeps for one in self.encode(text, add_special_tokens=False)}
        kept = self.special_token_ids & used
        if self._table is not None and self.knows_token_bytes:
            return ByteDetokenizer(self._table, keeps=kept)
        if not kept:
            return WindowDetokenizer(self._decode_whole)
        return WindowDetokenizer(functools.partial(self._decode_keeping, kept))

    def _decode_whole(self, token_ids: Sequence[int]) -> str:
        return self._decode(token_ids, skip_special_tokens=True)

    def _decode_keeping(self, kept: frozenset[int], token_ids: Sequence[int]) -> str:
        """The library drops all special tokens or none, so the others are taken out before."""
        dropped = self.special_token_ids - kept
        return self._decode(
            [one for one in token_ids if one not in dropped], skip_special_tokens=False
        )

    def _decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        if self._backend is not None:
            decoded = self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
            return str(decoded)
        with self._lock:
            decoded = self.wrapped.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return str(decoded)


def _refusal(error: Exception, *, continues: bool) -> InvalidRequestError | None:
    """What a client is told; None for a failure that no template causes.

    A template is a program: content of a kind it does not expect fails anywhere in it.
    """
    if isinstance(error, TemplateError):
        message = f"the model's chat template refuses these messages: {error.message or error}"
    elif isinstance(error, ValueError) and continues:
        # The library's message quotes the conversation.
        message = (
            "the model's chat template does not show the final message as it is, so it cannot be "
            "continued; send a user message after it"
        )
    elif isinstance(error, TypeError | ValueError | LookupError | AttributeError):
        message = f"the model's chat template cannot render these messages: {error}"
    elif isinstance(error, ArithmeticError | AssertionError | RuntimeError | MemoryError):
        message = (
            f"the model's chat template cannot render these messages: {type(error).__name__} in it"
        )
    else:
        return None
    return InvalidRequestError(message, param="messages")


def _with_arguments_as_text(message: dict[str, object]) -> dict[str, object]:
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    return {**message, "tool_calls": [_call_as_text(call) for call in calls]}


def _call_as_text(call: object) -> object:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        return call
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        return call
    text = json.dumps(arguments or {}, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": text}}


def _shared_backend(wrapped: WrappedTokenizer) -> Backend | None:
    """The Rust tokenizer, or None where Python code stands between it and the text."""
    from mlx_lm.tokenizer_utils import NewlineTokenizer  # noqa: PLC0415 - imported by the loader

    inner = getattr(wrapped, "_tokenizer", wrapped)
    if isinstance(inner, NewlineTokenizer):
        return None
    return getattr(inner, "backend_tokenizer", None) if getattr(inner, "is_fast", False) else None
