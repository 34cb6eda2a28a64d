"""What a model's chat template can do: tools, reasoning, a system message.

Found by rendering a few words with it in transformers' sandbox, and from mlx-lm's own knowledge of
how models write tool calls and thoughts. No tokenizer is built: its vocabulary is read as data.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from machd.engine.checkpoint import Checkpoint
from machd.engine.gguf_header import GgufHeader
from machd.engine.inspection_bounds import bounded, printable
from machd.errors import ModelFormatError, ModelNotFoundError, SettingsError

__all__ = ["TemplateAbilities", "directory_abilities", "gguf_abilities"]

_NO_CHAT = "none"
_RENDER_LIMIT_S = 5.0
_RENDER_MEMORY_BYTES = 256 << 20
_MAX_JSON_BYTES = 128 << 20
"""Of tokenizer.json; those of the largest vocabularies have 35 MiB."""

_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt")
_MODULE_NAME = re.compile(r"[a-z0-9_]+")

_MARK = "zq7marker"
"""A word that no template contains by itself."""

_SYSTEM: dict[str, object] = {"role": "system", "content": _MARK}
_USER: dict[str, object] = {"role": "user", "content": "Hello"}
_TOOL: dict[str, object] = {
    "type": "function",
    "function": {
        "name": _MARK,
        "description": "Look something up.",
        "parameters": {
            "type": "object",
            "properties": {"key": {"type": "string", "description": "What to look up."}},
            "required": ["key"],
        },
    },
}

_Render = Callable[..., str]
"""Messages, and what else the template reads, to text."""


@dataclass(frozen=True, slots=True)
class TemplateAbilities:
    """What a conversation with the model may contain.

    Attributes:
        present: Whether there is a template at all; without one the model takes prompts only.
        system_role: Whether a system message reaches the prompt.
        tools: Whether the template shows tools to the model.
        tool_format: mlx-lm's name for how the model writes calls; None where it knows none.
        reasoning_tags: What the model puts around its thoughts; None where it has none.
        reasoning_switch: Whether ``enable_thinking`` changes the prompt.
        problem: Why nothing could be found out; empty otherwise.
    """

    present: bool = False
    system_role: bool = False
    tools: bool = False
    tool_format: str | None = None
    reasoning_tags: tuple[str, str] | None = None
    reasoning_switch: bool = False
    problem: str = ""


@dataclass(frozen=True, slots=True)
class _TokenizerFacts:
    """What stands in tokenizer files; mlx-lm's guesses take it for a tokenizer.

    Attributes:
        chat_template: The Jinja source that mlx-lm would look at.
        tool_template: The one for conversations with tools, where it is another.
        renderer: mlx-lm's own renderer, where the files name one instead of a template.
    """

    vocabulary: Mapping[str, int]
    chat_template: str | None
    tool_template: str | None = None
    renderer: str | None = None
    tool_format: str | None = None
    special_tokens: Mapping[str, str] = field(default_factory=dict)

    def get_vocab(self) -> Mapping[str, int]:
        """Token to id, as ``PreTrainedTokenizer`` names it."""
        return self.vocabulary

    def encode(self, _text: str, *, add_special_tokens: bool) -> list[int]:
        """No ids: mlx-lm encodes the tags it found, and here their names are enough."""
        assert not add_special_tokens
        return []


def directory_abilities(checkpoint: Checkpoint, chat_template: str | None) -> TemplateAbilities:
    """Of the template beside the weights, or of the one that replaces it.

    Raises:
        ModelNotFoundError: There are no tokenizer files.
        ModelFormatError: They are not JSON.
        SettingsError: The file that shall replace the template cannot be read.
    """
    path = checkpoint.path
    if not any((path / name).is_file() for name in _FILES) and not any(path.glob("*.tiktoken")):
        raise ModelNotFoundError(
            f"{path.name} holds no tokenizer files (tokenizer.json or tokenizer.model); copy them "
            "beside the weights"
        )
    config = _read_object(path / "tokenizer_config.json")
    plain, with_tools = _templates(path, config)
    facts = _TokenizerFacts(
        vocabulary=_vocabulary(_read_object(path / "tokenizer.json"), config),
        chat_template=plain,
        tool_template=with_tools,
        renderer=_module_name(config.get("chat_template_type")),
        tool_format=_module_name(config.get("tool_parser_type")),
        special_tokens=_special_tokens(config),
    )
    return _abilities(_replaced(facts, chat_template))


def gguf_abilities(header: GgufHeader, chat_template: str | None) -> TemplateAbilities:
    """Of the template inside a GGUF file, or of the one that replaces it.

    Raises:
        ModelFormatError: The file holds no vocabulary.
        SettingsError: The file that shall replace the template cannot be read.
    """
    tokens = header.texts("tokenizer.ggml.tokens")
    template = header.metadata.get("tokenizer.chat_template")
    special = {
        f"{name}_token": tokens[index]
        for name in ("bos", "eos")
        if isinstance(index := header.metadata.get(f"tokenizer.ggml.{name}_token_id"), int)
        and 0 <= index < len(tokens)
    }
    facts = _TokenizerFacts(
        vocabulary={token: index for index, token in enumerate(tokens)},
        chat_template=template if isinstance(template, str) and template.strip() else None,
        special_tokens=special,
    )
    return _abilities(_replaced(facts, chat_template))


def _abilities(facts: _TokenizerFacts) -> TemplateAbilities:
    if facts.chat_template is None and facts.renderer is None:
        return TemplateAbilities(problem="the model has no chat template; it takes prompts only")
    try:
        with bounded(
            "rendering the chat template",
            seconds=_RENDER_LIMIT_S,
            memory_bytes=_RENDER_MEMORY_BYTES,
        ):
            return _rendered_abilities(facts)
    except Exception as error:  # noqa: BLE001 - a template is a program, and fails like one
        return TemplateAbilities(
            present=True, problem=f"the chat template fails: {printable(error)}"
        )


def _rendered_abilities(facts: _TokenizerFacts) -> TemplateAbilities:
    from mlx_lm.tokenizer_utils import (  # noqa: PLC0415 - after import_mlx_lm()
        _infer_thinking,
        _infer_tool_parser,
    )

    render = _renderer(facts, facts.chat_template)
    think_start, think_end, *_ = _infer_thinking(facts)
    has_thinking = think_start is not None
    render([_USER], enable_thinking=has_thinking)
    with_tools = _renderer(facts, facts.tool_template or facts.chat_template)
    return TemplateAbilities(
        present=True,
        system_role=_shows_mark(partial(render, [_SYSTEM, _USER], enable_thinking=has_thinking)),
        tools=_shows_mark(partial(with_tools, [_USER], tools=[_TOOL])),
        tool_format=facts.tool_format or _infer_tool_parser(facts),
        reasoning_tags=(think_start, think_end) if has_thinking else None,
        reasoning_switch=(
            render([_USER], enable_thinking=True) != render([_USER], enable_thinking=False)
        ),
    )


def _renderer(facts: _TokenizerFacts, template: str | None) -> _Render:
    """What makes text of messages: mlx-lm's own renderer where one is named, else the template."""
    if facts.renderer is not None:
        module = importlib.import_module(f"mlx_lm.chat_templates.{facts.renderer}")
        return partial(module.apply_chat_template, add_generation_prompt=True)
    from transformers.utils.chat_template_utils import (  # noqa: PLC0415 - mlx-lm imported it
        render_jinja_template,
    )

    def render(messages: list[dict[str, object]], **variables: object) -> str:
        texts, _ = render_jinja_template(
            conversations=[messages],
            chat_template=template,
            add_generation_prompt=True,
            **{"tools": None, **facts.special_tokens, **variables},
        )
        return str(texts[0])

    return render


def _shows_mark(render: Callable[[], str]) -> bool:
    """Whether what was put in comes out; a template that refuses it says no."""
    from jinja2.exceptions import TemplateError  # noqa: PLC0415 - imported with transformers

    try:
        return _MARK in render()
    except (TemplateError, TypeError, ValueError, LookupError, AttributeError):
        return False


def _replaced(facts: _TokenizerFacts, chat_template: str | None) -> _TokenizerFacts:
    """With the template that the settings name."""
    if chat_template is None:
        return facts
    text = None if chat_template == _NO_CHAT else _read_template(Path(chat_template))
    return replace(facts, chat_template=text, tool_template=None, renderer=None)


def _read_template(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise SettingsError([f"model.chat_template: cannot read {path}: {reason}"]) from error


def _templates(path: Path, config: Mapping[str, object]) -> tuple[str | None, str | None]:
    """The template, and the one for tools, from the places that transformers looks into."""
    file = path / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8"), None
        except (OSError, UnicodeDecodeError) as error:
            raise ModelFormatError(f"{file.name} cannot be read: {printable(error)}") from error
    value = _read_object(path / "chat_template.json").get("chat_template")
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


def _vocabulary(tokenizer: Mapping[str, object], config: Mapping[str, object]) -> Mapping[str, int]:
    """Tokens to ids, added ones included; of a SentencePiece model the added ones alone."""
    model = tokenizer.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    found: dict[str, int] = dict(vocabulary) if isinstance(vocabulary, dict) else {}
    added = tokenizer.get("added_tokens")
    decoder = config.get("added_tokens_decoder")
    for one in [
        *(added if isinstance(added, list) else []),
        *(decoder.values() if isinstance(decoder, dict) else []),
    ]:
        if isinstance(one, dict) and isinstance(one.get("content"), str):
            found.setdefault(one["content"], len(found))
    return found


def _special_tokens(config: Mapping[str, object]) -> Mapping[str, str]:
    """Begin and end of text as templates read them; a token is a text or an object."""
    found: dict[str, str] = {}
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        value = config.get(name)
        content = value.get("content") if isinstance(value, dict) else value
        if isinstance(content, str):
            found[name] = content
    return found


def _module_name(value: object) -> str | None:
    """A module of mlx-lm's, never a path to another one."""
    return value if isinstance(value, str) and _MODULE_NAME.fullmatch(value) else None


def _read_object(path: Path) -> dict[str, object]:
    """A JSON object; empty where there is no such file.

    Raises:
        ModelFormatError: It is not one.
    """
    if not path.is_file():
        return {}
    try:
        with path.open("rb") as file:
            text = file.read(_MAX_JSON_BYTES + 1)
        if len(text) > _MAX_JSON_BYTES:
            raise ModelFormatError(f"{path.name} is larger than {_MAX_JSON_BYTES >> 20} MiB")
        value = json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFormatError(f"{path.name} is not valid JSON: {printable(error)}") from error
    if not isinstance(value, dict):
        raise ModelFormatError(f"{path.name} is not a JSON object")
    return value
