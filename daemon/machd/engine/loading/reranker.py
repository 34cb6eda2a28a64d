"""A checkpoint's word that it is a generative reranker: sentence-transformers' files, or the operator's setting.

A model's name is no such word. What the files say and machd cannot do is noted, and the model generates all the same.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from machd.engine.backend.model_files import MAX_JSON_BYTES, read_bytes, read_object
from machd.engine.loading.source import ModelSource, SourceKind
from machd.engine.protocol.reranker import DEFAULT_INSTRUCTION, RerankerDescription, pair_messages
from machd.engine.protocol.tokenizer import Tokenizer
from machd.errors import MachdError, ModelError, ModelFormatError, SettingsError

_MODULES = "modules.json"
_OPTIONS = "config_sentence_transformers.json"
_SCORE_MODULE = ".LogitScore"
"""End of the module's name; the packages before it have changed between versions."""

_QWEN3_TOKENS = ("<|im_start|>", "<|im_end|>", "<think>", "</think>", "yes", "no")
"""Texts that are one token each for a model that reads Qwen3-Reranker's prompt."""

_MARKS = ("zq7instruction", "zq7query", "zq7document")


def read_reranker(
    source: ModelSource, tokenizer: Tokenizer, *, kind: str
) -> tuple[RerankerDescription | None, tuple[str, ...]]:
    """Return how a model scores documents, None if it is no reranker, and notes on what cannot be done.

    Args:
        source: The model's files; a GGUF file holds no such word.
        tokenizer: The model's.
        kind: ``model.kind``.

    Raises:
        SettingsError: ``model.kind`` calls a model a reranker that cannot read a reranker's prompt.
    """
    files = source.path if source.kind is SourceKind.DIRECTORY else None
    try:
        found = None if files is None else _from_files(files, tokenizer)
    except ModelError as error:
        if kind == "auto":
            return None, (f"{error.message}; reranking is refused",)
        found = None
    if found is not None or kind == "auto":
        return found, ()
    return _from_setting(tokenizer), ()


def _from_files(directory: Path, tokenizer: Tokenizer) -> RerankerDescription | None:
    """Read the description from the checkpoint's files.

    Raises:
        ModelError: They name a reranker that machd cannot serve.
    """
    score_path = _score_module(directory / _MODULES)
    if score_path is None:
        return None
    name = f"{score_path}/config.json"
    config = read_object(directory / score_path / "config.json") or {}
    true_token_id, false_token_id = (
        _token_id(config, key, name, tokenizer) for key in ("true_token_id", "false_token_id")
    )
    if not _carries_pairs(tokenizer):
        raise ModelFormatError(
            "the chat template shows no query and document, so that machd does not know the reranker's prompt; "
            "put a chat_template.jinja with these roles beside the weights"
        )
    return RerankerDescription(
        true_token_id,
        false_token_id,
        _instruction(read_object(directory / _OPTIONS) or {}),
        has_template=True,
    )


def _from_setting(tokenizer: Tokenizer) -> RerankerDescription:
    unknown = [
        one for one in _QWEN3_TOKENS if len(tokenizer.encode(one, add_special_tokens=False)) != 1
    ]
    if unknown:
        raise SettingsError(
            [
                f"model.kind is reranker, and this model has no token for {unknown[0]!r}, which the prompt needs"
            ]
        )
    true_token_id, false_token_id = (
        tokenizer.encode(one, add_special_tokens=False)[0] for one in ("yes", "no")
    )
    return RerankerDescription(
        true_token_id, false_token_id, has_template=_carries_pairs(tokenizer)
    )


def _score_module(path: Path) -> PurePosixPath | None:
    """Return the folder of the module that scores, None without one.

    Raises:
        ModelError: The list of modules cannot be read.
    """
    try:
        modules = json.loads(read_bytes(path, MAX_JSON_BYTES))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ModelFormatError(f"cannot read {path.name}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ModelFormatError(f"{path.name} is not valid JSON") from error
    for module in modules if isinstance(modules, list) else ():
        if isinstance(module, dict) and str(module.get("type")).endswith(_SCORE_MODULE):
            folder = PurePosixPath(str(module.get("path", "")))
            if folder.is_absolute() or ".." in folder.parts:
                raise ModelFormatError(f"{path.name}: a module's path leads out of the checkpoint")
            return folder
    return None


def _token_id(config: Mapping[str, object], key: str, name: str, tokenizer: Tokenizer) -> int:
    value = config.get(key)
    if value is None:
        raise ModelFormatError(f"{name} has no {key}; machd scores by two tokens")
    if not isinstance(value, int) or not 0 <= value < tokenizer.vocabulary_tokens:
        raise ModelFormatError(f"{name}: {key} is no token of the tokenizer")
    return value


def _instruction(options: Mapping[str, object]) -> str:
    """Return the text of the default prompt; Qwen3-Reranker's where the options name none."""
    prompts, name = options.get("prompts"), options.get("default_prompt_name")
    text = prompts.get(name) if isinstance(prompts, dict) else None
    return text if isinstance(text, str) else DEFAULT_INSTRUCTION


def _carries_pairs(tokenizer: Tokenizer) -> bool:
    """Return True if the chat template shows a query and a document, which most templates leave out or refuse."""
    if not tokenizer.has_chat_template:
        return False
    instruction, query, document = _MARKS
    try:
        text = tokenizer.render_chat(pair_messages(query, document, instruction))
    except MachdError:
        return False
    return all(text.count(one) == 1 for one in (query, document))
