"""The model's tokenizer, safe to call from any thread."""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from types import MappingProxyType

from machd.engine.backend.untyped import Backend, WrappedTokenizer
from machd.engine.protocol.chat_format import ChatFormat
from machd.engine.protocol.fill_format import FillFormat, find_fill_tokens
from machd.engine.protocol.tokenizer import ChatMessages, Detokenizer, TokenizerInfo
from machd.engine.tokenizer.detokenizer import ByteDetokenizer, WindowDetokenizer, decode_bytes
from machd.engine.tokenizer.plain_text import PlainTextEncoder
from machd.engine.tokenizer.system_probe import find_system_messages, takes_user_after_tool
from machd.engine.tokenizer.template_renderer import (
    MARK,
    TOOL,
    USER,
    TemplateRenderer,
    is_known_template,
    refusals_as_errors,
    without_date,
)
from machd.engine.tokenizer.token_table import TokenForm, TokenTable
from machd.errors import (
    ChatTemplateMissingError,
    InvalidRequestError,
    MachdError,
    TemplateLimitError,
)
from machd.panics import panics_as_errors


class MlxTokenizer:
    """A transformers tokenizer in mlx-lm's ``TokenizerWrapper``.

    A fast tokenizer is used through its Rust object, which threads may share; the Python layer
    around it raises "Already borrowed" when they do. A slow tokenizer is used under a lock.
    """

    def __init__(self, wrapped: WrappedTokenizer, *, chat: bool = True) -> None:
        self.wrapped = wrapped
        self._has_chat = chat and bool(wrapped.has_chat_template)
        self._renderer = TemplateRenderer()
        self._template_problem: str | None = None
        self._lock = threading.Lock()
        self._backend = _shared_backend(wrapped)
        if self._backend is not None:
            # Settings of the file that transformers switches off for each call: texts would be
            # truncated or padded in silence.
            self._backend.no_truncation()
            self._backend.no_padding()
        self._table = None if self._backend is None else TokenTable(self._backend)
        self._size_tokens = len(wrapped) if self._table is None else self._table.size_tokens

    @property
    def vocabulary_tokens(self) -> int:
        """The highest id that has a text, plus one."""
        return self._size_tokens

    @property
    def special_token_ids(self) -> frozenset[int]:
        """Tokens that stand for no text."""
        if self._table is not None:
            return self._table.special_token_ids
        return frozenset(self.wrapped.all_special_ids)

    @property
    def info(self) -> TokenizerInfo:
        """The special tokens and the chat template."""
        inner = getattr(self.wrapped, "_tokenizer", self.wrapped)
        with self._lock:
            named = dict(getattr(inner, "special_tokens_map", {}))
        return TokenizerInfo(
            class_name=type(inner).__name__,
            # Other entries are lists of further special tokens, without a role each.
            special_tokens={role: str(one) for role, one in named.items() if isinstance(one, str)},
            chat_template=self._template_source,
        )

    @property
    def knows_token_bytes(self) -> bool:
        """True if the :meth:`token_bytes` of a text's tokens, joined, are the text."""
        return self._table is not None and self._table.form is not TokenForm.OTHER

    @property
    def has_chat_template(self) -> bool:
        """True if :meth:`render_chat` can work."""
        return self._has_chat

    @property
    def chat_template(self) -> str | None:
        """The template's Jinja source; None without one, or where a library's code renders."""
        return None if _has_own_renderer(self.wrapped) else self._template_source

    @property
    def _template_source(self) -> str | None:
        templates = self.wrapped.chat_template if self._has_chat else None
        source = templates.get("default") if isinstance(templates, dict) else templates
        return source if isinstance(source, str) else None

    @functools.cached_property
    def fill_format(self) -> FillFormat | None:
        """The format of fill-in-the-middle prompts; None for a model without tokens for them."""
        added = self._added_tokens()
        tokens = find_fill_tokens(added)
        if tokens is None:
            return None
        encode: Callable[[str], list[int]] = functools.partial(
            self.encode, add_special_tokens=False
        )
        if self._backend is not None:
            names = [name for name, token_id in added.items() if token_id in tokens.all_ids]
            encode = PlainTextEncoder(self._backend, names).encode
        # Of the special tokens around an empty text, only a begin-of-text token opens a prompt.
        around = self.encode("", add_special_tokens=True)
        bos = self.wrapped.bos_token_id
        return FillFormat(tokens, encode, around[:1] if around[:1] == [bos] else ())

    def _added_tokens(self) -> dict[str, int]:
        if self._backend is not None:
            decoder = self._backend.get_added_tokens_decoder()
        else:
            with self._lock:
                decoder = self.wrapped.added_tokens_decoder
        return {token.content: token_id for token_id, token in decoder.items()}

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end a completion."""
        return frozenset(self.wrapped.eos_token_ids)

    @panics_as_errors("tokenizers")
    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Encode a text. A rendered chat holds its special tokens already: do not add them."""
        if self._backend is not None:
            # A batch of one: unlike `encode` it releases the GIL, and computes no offsets. A megabyte
            # would otherwise stop every stream for half a second.
            (encoding,) = self._backend.encode_batch_fast(
                [text], add_special_tokens=add_special_tokens
            )
            return list(encoding.ids)
        with self._lock:
            return list(self.wrapped.encode(text, add_special_tokens=add_special_tokens))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Decode token ids, special tokens left out."""
        if self._table is not None and self.knows_token_bytes:
            return decode_bytes(self._table, token_ids)
        return self._decode(token_ids)

    @functools.cached_property
    def chat_format(self) -> ChatFormat:
        """The format of a conversation; found by rendering a few words the first time."""
        shown = self._rendered_quietly(tools=[TOOL])
        rendered = ChatFormat(
            shows_tools=shown is not None and MARK in shown,
            system_messages=find_system_messages(self._rendered_quietly),
            takes_user_after_tool=takes_user_after_tool(self._rendered_quietly),
        )
        return _with_markers(rendered, self.wrapped)

    def _rendered_quietly(
        self,
        messages: ChatMessages = (USER,),
        tools: Sequence[Mapping[str, object]] = (),
    ) -> str | None:
        if self._template_problem is not None:
            return None  # a second attempt would take as long
        try:
            return self.render_chat(messages, tools=tools)
        except TemplateLimitError as error:
            self._template_problem = error.message
        except MachdError:
            pass
        return None

    def start_renderer(self) -> None:
        """Start the process that renders the chat template, so that it is ready for the first one.

        Raises:
            OverloadedError: The system has no room for its process.
        """
        if self._has_chat and not all(map(is_known_template, _templates(self.wrapped))):
            self._renderer.start()

    def template_notes(self) -> tuple[str, ...]:
        """Warn of a chat template that cannot be used; renders a few words to find out."""
        _ = self.chat_format
        if self._template_problem is None:
            return ()
        return (f"conversations are refused, completions are served: {self._template_problem}",)

    def close(self) -> None:
        """End the process that renders the chat template."""
        self._renderer.close()

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
        """Render a conversation in transformers' sandbox and within bounds."""
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
        read["add_generation_prompt"] = add_generation_prompt
        if _has_own_renderer(self.wrapped):
            return self._rendered_by_library(messages, **read)
        return self._rendered_by_template(messages, writes_date=writes_date, **read)

    def _rendered_by_template(
        self, messages: ChatMessages, *, writes_date: bool, **arguments: object
    ) -> str:
        """Do the work of ``apply_chat_template`` of mlx-lm and transformers in the renderer."""
        if not messages:
            raise InvalidRequestError("there is no message to render", param="messages")
        inner = self.wrapped._tokenizer  # noqa: SLF001 - mlx-lm has no other name for it
        tools = arguments.get("tools")
        given = [
            {key: value for key, value in message.items() if value is not None}
            for message in messages
        ]
        arguments.setdefault("enable_thinking", self.wrapped.has_thinking)
        try:
            template = inner.get_chat_template(None, tools)
        except ValueError as error:
            raise ChatTemplateMissingError(
                "this model has several chat templates and none of them is the default"
            ) from error
        if not writes_date:
            template = without_date(template)
        return self._renderer.render(template, given, {**inner.special_tokens_map, **arguments})

    def _rendered_by_library(self, messages: ChatMessages, **arguments: object) -> str:
        """Render with Python code of a dependency's; no code of a checkpoint's runs."""
        with refusals_as_errors(arguments):
            given = list(messages)
            if getattr(self.wrapped, "_chat_template", None) is not None:
                # Templates read arguments of calls as objects; mlx-lm's own renderers, as JSON text.
                given = [_with_arguments_as_text(message) for message in messages]
            return str(self.wrapped.apply_chat_template(given, tokenize=False, **arguments))

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token; a special token's are those of its name."""
        if self._table is not None:
            return self._table.bytes_of(token_id)
        with self._lock, panics_as_errors("tokenizers"):
            token = self.wrapped.convert_ids_to_tokens(token_id)
        return b"" if token is None else str(token).encode("utf-8")

    def detokenizer(self, *, keeps: Sequence[str] = ()) -> Detokenizer:
        """Make the detokenizer of one completion; see :class:`machd.engine.protocol.tokenizer.Tokenizer`."""
        used = {one for text in keeps for one in self.encode(text, add_special_tokens=False)}
        kept = self.special_token_ids & used
        if self._table is not None and self.knows_token_bytes:
            return ByteDetokenizer(self._table, keeps=kept)
        return WindowDetokenizer(functools.partial(self._decode, kept=kept))

    @panics_as_errors("tokenizers")
    def _decode(self, token_ids: Sequence[int], kept: frozenset[int] = frozenset()) -> str:
        """Decode with the library, special tokens left out except the kept ones."""
        # The library drops all special tokens or none.
        dropped = self.special_token_ids - kept if kept else ()
        ids = [one for one in token_ids if one not in dropped]
        if self._backend is not None:
            return str(self._backend.decode(ids, skip_special_tokens=not kept))
        with self._lock:
            return str(self.wrapped.decode(ids, skip_special_tokens=not kept))


def _with_markers(rendered: ChatFormat, wrapped: WrappedTokenizer) -> ChatFormat:
    """Add what mlx-lm has inferred of a tokenizer to what was found by rendering."""
    known = replace(
        rendered,
        reasoning_markers=(
            (wrapped.think_start, wrapped.think_end) if wrapped.has_thinking else None
        ),
        structural_markers=tuple(wrapped.structural_markers),
        transitions=dict(wrapped.response_transitions),
        first_state=wrapped.response_initial_state,
    )
    parser = wrapped.tool_parser if wrapped.has_tool_calling else None
    if parser is None:
        return known
    # mlx-lm's loader notes the format; of another loader's tokenizer the parser's module tells it.
    named = getattr(wrapped, "init_kwargs", {}).get("tool_parser_type")
    return replace(
        known,
        tool_format=str(named or parser.__module__.rpartition(".")[2]),
        tool_markers=(wrapped.tool_call_start, wrapped.tool_call_end or ""),
        parse=parser,
    )


def _has_own_renderer(wrapped: WrappedTokenizer) -> bool:
    """Tell whether a library's code renders conversations, and no template of the checkpoint's."""
    from transformers import PreTrainedTokenizerBase  # noqa: PLC0415 - imported by the loader

    inner = getattr(wrapped, "_tokenizer", wrapped)
    written = getattr(type(inner), "apply_chat_template", None)
    return (
        getattr(wrapped, "_chat_template", None) is not None
        or written is not PreTrainedTokenizerBase.apply_chat_template
    )


def _templates(wrapped: WrappedTokenizer) -> list[str]:
    """List the Jinja sources that conversations may be rendered with."""
    if _has_own_renderer(wrapped):
        return []
    templates = wrapped.chat_template
    return list(templates.values()) if isinstance(templates, dict) else [templates]


def _with_arguments_as_text(message: dict[str, object]) -> dict[str, object]:
    message = deepcopy(message)
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict) and not isinstance(function.get("arguments"), str):
            arguments = function.get("arguments") or {}
            function["arguments"] = json.dumps(arguments, ensure_ascii=False)
    return message


def _shared_backend(wrapped: WrappedTokenizer) -> Backend | None:
    """Find the Rust tokenizer; None where Python code changes the text before it."""
    from mlx_lm.tokenizer_utils import NewlineTokenizer  # noqa: PLC0415 - imported by the loader

    inner = getattr(wrapped, "_tokenizer", wrapped)
    if isinstance(inner, NewlineTokenizer):
        return None
    return getattr(inner, "backend_tokenizer", None) if getattr(inner, "is_fast", False) else None
