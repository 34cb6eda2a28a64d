"""Abilities of a model's chat template: tools, reasoning, a system message.

A few messages are rendered with it in transformers' sandbox, with limits; mlx-lm infers the format of tool
calls and thoughts. For that ``tokenizer.json`` is parsed by the tokenizers library, which takes some 0.4 s
for 128,000 tokens. transformers' classes are not used.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from tokenizers import Tokenizer

from machd.engine.backend.inspection_bounds import bounded, printable
from machd.engine.backend.model_files import (
    NO_CHAT,
    NO_TEMPLATE,
    check_tokenizer_files,
    read_bytes,
    read_object,
    read_template,
    read_text,
)
from machd.engine.backend.untyped import Backend
from machd.engine.loading.formats.checkpoint import Checkpoint
from machd.engine.loading.formats.gguf.header import GgufHeader
from machd.engine.loading.formats.gguf.tokenizer import build_tokenizer
from machd.engine.loading.tokenizer_files import check_growth, check_template_sizes
from machd.engine.protocol.chat_format import SystemMessages
from machd.engine.tokenizer.system_probe import find_system_messages
from machd.engine.tokenizer.template_renderer import (
    MARK,
    TOOL,
    USER,
    RenderBounds,
    TemplateRenderer,
)
from machd.errors import InvalidRequestError, ModelFormatError, TemplateLimitError
from machd.panics import ENDINGS

_RENDER_LIMIT_S = 5.0
_RENDER_MEMORY_BYTES = 256 << 20
_BUILD_LIMIT_S = 15.0
_BUILD_MEMORY_BYTES = 2 << 30
"""More than any real vocabulary has: the library aborts the process when it runs out of memory."""

_MODULE_NAME = re.compile(r"[a-z0-9_]{1,64}")

_NOT_BUILT = (
    "there is no tokenizer.json, and no other tokenizer was built to check the model: whether its "
    "files are whole is not known"
)

_Render = Callable[..., str]
"""Messages and the template's further variables to text."""


@dataclass(frozen=True, slots=True)
class TemplateAbilities:
    """The parts that a conversation with the model may have.

    Attributes:
        present: Whether there is a template at all; without one the model takes prompts only.
        reasoning_tags: Markers before and behind thoughts; None for a model without thoughts.
        reasoning_switch: Whether ``enable_thinking`` changes the prompt.
        problem: The reason why the abilities are not known, or why serve refuses; empty otherwise.
    """

    present: bool = False
    system_messages: SystemMessages = SystemMessages.NONE
    tools: bool = False
    tool_format: str | None = None
    reasoning_tags: tuple[str, str] | None = None
    reasoning_switch: bool = False
    problem: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _TokenizerFacts:
    """The contents of tokenizer files, with a tokenizer's methods for mlx-lm's inference of formats.

    Attributes:
        chat_template: The Jinja source that mlx-lm would use.
        tool_template: A second one for conversations with tools; None for most.
        renderer: mlx-lm's own renderer, where the files name one instead of a template.
    """

    vocabulary: Mapping[str, int]
    chat_template: str | None
    tool_template: str | None = None
    renderer: str | None = None
    tool_format: str | None = None
    special_tokens: Mapping[str, str] = field(default_factory=dict)

    def get_vocab(self) -> Mapping[str, int]:
        """Return token to id; the name is that of ``PreTrainedTokenizer``."""
        return self.vocabulary

    def encode(self, _text: str, *, add_special_tokens: bool) -> list[int]:
        """Return no ids: mlx-lm encodes the tags that it found, and only their names are used here."""
        assert not add_special_tokens
        return []


class _Vocabulary(Mapping[str, int]):
    """Tokens to ids, added ones included; it asks the tokenizer for each, since a dict takes 0.1 s."""

    def __init__(self, tokenizer: Backend | None, config: Mapping[str, object]) -> None:
        self._tokenizer = tokenizer
        decoder = config.get("added_tokens_decoder")
        added = decoder.values() if isinstance(decoder, dict) else ()
        contents = [one.get("content") for one in added if isinstance(one, dict)]
        self._added = {
            one: -1 - index for index, one in enumerate(contents) if isinstance(one, str)
        }

    def __getitem__(self, token: str) -> int:
        found = None if self._tokenizer is None else self._tokenizer.token_to_id(token)
        return self._added[token] if found is None else int(found)

    def __iter__(self) -> Iterator[str]:
        known = {} if self._tokenizer is None else self._tokenizer.get_vocab()
        return iter({**self._added, **known})

    def __len__(self) -> int:
        return sum(1 for _ in self)


def find_abilities(checkpoint: Checkpoint, chat_template: str | None) -> TemplateAbilities:
    """Find the abilities of the template beside the weights or inside a file, or of the one that overrides it.

    Raises:
        ModelNotFoundError: There are no tokenizer files.
        ModelFormatError: They are not JSON, or make no tokenizer that machd reads.
        SettingsError: The overriding template cannot be read.
    """
    if checkpoint.header is not None:
        return _gguf_abilities(checkpoint.header, chat_template)
    return _directory_abilities(checkpoint, chat_template)


def _directory_abilities(checkpoint: Checkpoint, chat_template: str | None) -> TemplateAbilities:
    path = checkpoint.path
    check_tokenizer_files(path)
    config = read_object(path / "tokenizer_config.json") or {}
    plain, with_tools = _templates(path, config)
    check_template_sizes({"": plain, "tool_use": with_tools}, path.name)
    tokenizer = _fast_tokenizer(path / "tokenizer.json")
    check_growth(tokenizer, path.name)
    facts = _TokenizerFacts(
        vocabulary=_Vocabulary(tokenizer, config),
        chat_template=plain,
        tool_template=with_tools,
        renderer=_module_name(config.get("chat_template_type")),
        tool_format=_module_name(config.get("tool_parser_type")),
        special_tokens=_special_tokens(config),
    )
    found = _abilities(facts, chat_template)
    return found if tokenizer is not None else replace(found, notes=(_NOT_BUILT,))


def _gguf_abilities(header: GgufHeader, chat_template: str | None) -> TemplateAbilities:
    with bounded(
        "building the tokenizer", seconds=_BUILD_LIMIT_S, memory_bytes=_BUILD_MEMORY_BYTES
    ):
        built = build_tokenizer(header)
    check_template_sizes(built.chat_templates, header.path.name)
    facts = _TokenizerFacts(
        vocabulary=_Vocabulary(built.tokenizer, {}),
        chat_template=built.chat_templates.get("default"),
        tool_template=built.chat_templates.get("tool_use"),
        special_tokens=built.special_tokens,
    )
    return replace(_abilities(facts, chat_template), notes=built.notes)


def _abilities(facts: _TokenizerFacts, chat_template: str | None) -> TemplateAbilities:
    if chat_template == NO_CHAT:
        return TemplateAbilities(problem="served without chat, as model.chat_template says")
    if chat_template is not None:
        text = read_template(Path(chat_template))
        facts = replace(facts, chat_template=text, tool_template=None, renderer=None)
    if facts.chat_template is None and facts.renderer is None:
        return TemplateAbilities(problem=f"serve refuses it as it is: {NO_TEMPLATE}")
    renderer = TemplateRenderer(RenderBounds(_RENDER_LIMIT_S, _RENDER_MEMORY_BYTES))
    try:
        return _rendered_abilities(facts, renderer)
    except Exception as error:  # noqa: BLE001 - a template is a program, and raises any error
        return TemplateAbilities(
            present=True, problem=f"the chat template fails: {printable(error)}"
        )
    finally:
        renderer.close()


def _rendered_abilities(facts: _TokenizerFacts, renderer: TemplateRenderer) -> TemplateAbilities:
    from mlx_lm.tokenizer_utils import (  # noqa: PLC0415 - after import_mlx_lm()
        _infer_thinking,
        _infer_tool_parser,
    )

    render = _render(facts, facts.chat_template, renderer)

    def render_or_none(messages: list[dict[str, object]]) -> str | None:
        return _rendered_or_none(partial(render, messages, enable_thinking=has_thinking))

    think_start, think_end, *_ = _infer_thinking(facts)
    has_thinking = think_start is not None
    render([USER], enable_thinking=has_thinking)
    with_tools = _render(facts, facts.tool_template or facts.chat_template, renderer)
    return TemplateAbilities(
        present=True,
        system_messages=find_system_messages(render_or_none),
        tools=MARK in (_rendered_or_none(partial(with_tools, [USER], tools=[TOOL])) or ""),
        tool_format=facts.tool_format or _infer_tool_parser(facts),
        reasoning_tags=(think_start, think_end) if has_thinking else None,
        reasoning_switch=(
            render([USER], enable_thinking=True) != render([USER], enable_thinking=False)
        ),
    )


def _render(facts: _TokenizerFacts, template: str | None, renderer: TemplateRenderer) -> _Render:
    """Return mlx-lm's own renderer where one is named, else the template's."""
    if facts.renderer is not None:
        module = importlib.import_module(f"mlx_lm.chat_templates.{facts.renderer}")
        return partial(module.apply_chat_template, add_generation_prompt=True)
    assert template is not None, "a template, or the name of a renderer"

    def render(messages: list[dict[str, object]], **variables: object) -> str:
        given = {"add_generation_prompt": True, **facts.special_tokens, **variables}
        return renderer.render(template, messages, given)

    return render


def _rendered_or_none(render: Callable[[], str]) -> str | None:
    """Return the prompt; None where the template refuses the messages."""
    try:
        return render()
    except TemplateLimitError:
        raise
    except (InvalidRequestError, TypeError, ValueError, LookupError, AttributeError):
        return None


def _templates(path: Path, config: Mapping[str, object]) -> tuple[str | None, str | None]:
    """Find the template, and the one for tools, in the places that transformers reads."""
    file = path / "chat_template.jinja"
    if file.is_file():
        try:
            return read_text(file), None
        except OSError as error:
            raise ModelFormatError(f"{file.name} cannot be read: {error.strerror}") from error
    value = (read_object(path / "chat_template.json") or {}).get("chat_template")
    value = config.get("chat_template") if value is None else value
    if isinstance(value, str):
        return value, None
    named = {
        str(one.get("name")): one.get("template")
        for one in (value if isinstance(value, list) else [])
        if isinstance(one, dict)
    }
    plain, with_tools = named.get("default"), named.get("tool_use")
    return (
        plain if isinstance(plain, str) else None,
        with_tools if isinstance(with_tools, str) else None,
    )


def _fast_tokenizer(path: Path) -> Backend | None:
    """Build the tokenizer of ``tokenizer.json``; None where there is no such file."""
    try:
        content = read_bytes(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ModelFormatError(f"{path.name} cannot be read: {error.strerror}") from error
    try:
        return Tokenizer.from_buffer(content)
    except ENDINGS:
        raise
    except (
        BaseException
    ) as error:  # the library raises a bare Exception; its panics are BaseExceptions
        raise ModelFormatError(f"{path.name} makes no tokenizer: {printable(error)}") from error


def _special_tokens(config: Mapping[str, object]) -> Mapping[str, str]:
    """Find the special tokens that templates read; a token is a text or an object."""
    found: dict[str, str] = {}
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        value = config.get(name)
        content = value.get("content") if isinstance(value, dict) else value
        if isinstance(content, str):
            found[name] = content
    return found


def _module_name(value: object) -> str | None:
    """Check that a value is a plain module name, never a path."""
    return value if isinstance(value, str) and _MODULE_NAME.fullmatch(value) else None
