"""A model's tokenizer and chat template from its files, without mlx."""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from machd.engine.backend.inspection_bounds import printable
from machd.engine.backend.mlx_lm_import import import_mlx_lm_tokenizers
from machd.engine.backend.model_files import (
    MAX_TEMPLATE_BYTES,
    NO_CHAT,
    NO_TEMPLATE,
    check_tokenizer_files,
    read_object,
    read_template,
)
from machd.engine.backend.own_code import closed_to_own_code
from machd.engine.backend.untyped import Backend, HfTokenizer, WrappedTokenizer
from machd.engine.loading.architecture import tokenizer_defaults
from machd.engine.loading.formats.checkpoint import Checkpoint
from machd.engine.loading.formats.gguf.header import GgufHeader
from machd.engine.loading.formats.gguf.tokenizer import build_tokenizer
from machd.engine.tokenizer.tokenizer import MlxTokenizer
from machd.errors import ChatTemplateMissingError, ModelCodeError, ModelError, ModelFormatError
from machd.panics import ENDINGS

_MAX_GROWTH = 100
"""Most characters that a normalizer or decoder may turn one into; real ones add a space or two."""


@dataclass(frozen=True, slots=True)
class _Handover:
    """A tokenizer that transformers takes as it is.

    transformers makes a deep copy, by way of JSON: 4 s of processor time for 262,000 tokens.
    """

    backend: Backend

    def __deepcopy__(self, _memo: object) -> Backend:
        return self.backend


def open_tokenizer(
    checkpoint: Checkpoint, chat_template: str | None, *, trust_remote_code: bool
) -> tuple[MlxTokenizer, tuple[str, ...]]:
    """Open the tokenizer of a model to serve; return it with warnings.

    Args:
        checkpoint: The model's.
        chat_template: A file that replaces the model's template, ``none`` to serve without chat,
            or None for the model's own.
        trust_remote_code: Whether the checkpoint's own Python code may run.

    Raises:
        ModelError: One of its kinds: see :func:`directory_tokenizer` and :func:`gguf_tokenizer`.
        OverloadedError: The system has no room for the process that renders its chat template.
    """
    notes: tuple[str, ...] = ()
    if checkpoint.header is not None:
        tokenizer, notes = gguf_tokenizer(checkpoint.header, chat_template=chat_template)
    else:
        tokenizer = directory_tokenizer(
            checkpoint, chat_template, trust_remote_code=trust_remote_code
        )
    tokenizer.start_renderer()
    return tokenizer, notes


def directory_tokenizer(
    checkpoint: Checkpoint, chat_template: str | None, *, trust_remote_code: bool
) -> MlxTokenizer:
    """Read the tokenizer beside the weights.

    Raises:
        ModelNotFoundError: There are no tokenizer files.
        ModelFormatError: They cannot be read.
        ModelCodeError: The tokenizer is Python code of the checkpoint's, and that is not allowed.
        ChatTemplateMissingError: There is no chat template, and no setting to serve without one.
    """
    import_mlx_lm_tokenizers()
    from mlx_lm.tokenizer_utils import load  # noqa: PLC0415 - just imported

    path = checkpoint.path
    check_tokenizer_files(path)
    try:
        with closed_to_own_code(is_trusted=trust_remote_code):
            wrapped = load(
                path,
                {"trust_remote_code": trust_remote_code},
                eos_token_ids=_eos_token_ids(checkpoint),
                defaults=tokenizer_defaults(checkpoint.config),
            )
    except ENDINGS:
        raise
    except BaseException as error:
        # transformers and tokenizers raise errors of any kind, and a panic is no Exception.
        if checkpoint.code_files and not trust_remote_code:
            raise ModelCodeError(
                f"the tokenizer needs Python code of the checkpoint's own, named in "
                f"{checkpoint.code_files[-1]}; read it, and pass `--model-trust-remote-code` if "
                "you trust it"
            ) from error
        raise ModelFormatError(
            f"the tokenizer files of {path.name} cannot be read: {printable(error)}"
        ) from error
    check_growth(getattr(wrapped, "backend_tokenizer", None), path.name)
    check_template_sizes(wrapped.chat_template, path.name)
    return _with_template(wrapped, chat_template)


def gguf_tokenizer(
    header: GgufHeader, *, chat_template: str | None
) -> tuple[MlxTokenizer, tuple[str, ...]]:
    """Build the tokenizer inside a GGUF file; return it with warnings.

    Raises:
        ModelFormatError: The metadata hold no tokenizer that machd reads.
        ChatTemplateMissingError: There is no chat template, and no setting to serve without one.
    """
    import_mlx_lm_tokenizers()
    from mlx_lm.tokenizer_utils import TokenizerWrapper  # noqa: PLC0415 - just imported
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415 - the same

    vocabulary = build_tokenizer(header)
    check_template_sizes(vocabulary.chat_templates, header.path.name)
    templates = vocabulary.chat_templates
    inner = PreTrainedTokenizerFast(
        tokenizer_object=_Handover(vocabulary.tokenizer),
        chat_template=dict(templates) if len(templates) > 1 else templates.get("default"),
        clean_up_tokenization_spaces=False,
        **vocabulary.special_tokens,
    )
    known = inner.get_vocab()
    # mlx-lm looks for markers in three places, and transformers builds the vocabulary anew for each.
    inner.get_vocab = lambda: known
    wrapped = TokenizerWrapper(inner, eos_token_ids=vocabulary.eos_token_ids, **_tool_format(inner))
    del inner.get_vocab
    return _with_template(wrapped, chat_template), vocabulary.notes


def check_growth(backend: Backend | None, name: str) -> None:
    """Bound the growth of a text in a tokenizer's normalizer and decoder.

    Raises:
        ModelFormatError: It exceeds that of any real tokenizer: a short prompt would take all memory.
    """
    for part in () if backend is None else (backend.normalizer, backend.decoder):
        if part is not None and _growth(json.loads(part.__getstate__())) > _MAX_GROWTH:
            raise ModelFormatError(
                f"the tokenizer of {name} makes texts more than {_MAX_GROWTH} times as long; fetch or "
                "copy tokenizer.json again"
            )


def _growth(step: Mapping[str, Any]) -> float:
    """Return an upper bound of the characters into which a normalizer or decoder turns one."""
    inner = step.get("normalizers") or step.get("decoders") or ()
    growth = math.prod(_growth(one) for one in inner)
    if step["type"] == "Prepend":
        growth *= 1 + len(step["prepend"])
    if step["type"] == "Replace":
        pattern = step["pattern"].get("String")
        # A regular expression may match an empty text.
        added = len(step["content"]) / len(pattern) if pattern else 1 + len(step["content"])
        growth *= max(1.0, added)
    return growth


def check_template_sizes(templates: object, name: str) -> None:
    """Bound the size of a tokenizer's chat templates.

    Raises:
        ModelFormatError: A template is larger than any real one.
    """
    for one in templates.values() if isinstance(templates, Mapping) else (templates,):
        if isinstance(one, str) and len(one) > MAX_TEMPLATE_BYTES:
            raise ModelFormatError(
                f"the chat template of {name} is larger than {MAX_TEMPLATE_BYTES >> 20} MiB"
            )


def _eos_token_ids(checkpoint: Checkpoint) -> object:
    """Read the end tokens: ``generation_config.json`` before ``config.json``, as mlx-lm does."""
    try:
        generation = read_object(checkpoint.path / "generation_config.json") or {}
    except ModelError:
        generation = {}
    return generation.get("eos_token_id") or checkpoint.config.get("eos_token_id")


def _tool_format(inner: HfTokenizer) -> dict[str, object]:
    """Infer the format of tool calls as mlx-lm's own loader does."""
    from mlx_lm.tokenizer_utils import _infer_tool_parser  # noqa: PLC0415 - mlx-lm 0.32.2

    name = _infer_tool_parser(inner)
    if name is None:
        return {}
    module = importlib.import_module(f"mlx_lm.tool_parsers.{name}")
    return {
        "tool_parser": module.parse_tool_call,
        "tool_call_start": module.tool_call_start,
        "tool_call_end": module.tool_call_end,
    }


def _with_template(wrapped: WrappedTokenizer, chat_template: str | None) -> MlxTokenizer:
    if chat_template == NO_CHAT:
        return MlxTokenizer(wrapped, chat=False)
    if chat_template is not None:
        # Without this mlx-lm would prefer its own renderer, where the checkpoint names one.
        wrapped._chat_template = None  # noqa: SLF001
        wrapped.chat_template = read_template(Path(chat_template))
        wrapped.has_chat_template = True
    if not wrapped.has_chat_template:
        raise ChatTemplateMissingError(NO_TEMPLATE)
    return MlxTokenizer(wrapped)
