"""A checkpoint's word that it is a generative reranker: sentence-transformers' files, or the operator's setting.

A model's name is no such word. What the files say and machd cannot do is noted, and the model generates all the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from machd.engine.backend.model_files import read_object
from machd.engine.loading.module_list import LOGIT_SCORE, listed_modules
from machd.engine.loading.source import ModelSource, SourceKind
from machd.engine.protocol.reranker import DEFAULT_INSTRUCTION, RerankerDescription, pair_messages
from machd.engine.protocol.tokenizer import ChatMessages, Tokenizer
from machd.errors import MachdError, ModelError, ModelFormatError, SettingsError

_OPTIONS = "config_sentence_transformers.json"
_QWEN3_TOKENS = ("<|im_start|>", "<|im_end|>", "<think>", "</think>", "yes", "no")
"""Texts that are one token each for a model that reads Qwen3-Reranker's prompt."""

_QUERY, _DOCUMENT = "zq7query", "zq7document"


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
    modules = listed_modules(directory) or []
    score_path = next((path for kind, path in modules if kind == LOGIT_SCORE), None)
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
    return RerankerDescription(true_token_id, false_token_id, has_template=_is_for_pairs(tokenizer))


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
    """Return True if the chat template shows a query and a document, which many leave out or refuse."""
    return _shows(tokenizer, pair_messages(_QUERY, _DOCUMENT, DEFAULT_INSTRUCTION))


def _is_for_pairs(tokenizer: Tokenizer) -> bool:
    """Return True if the chat template knows the roles of a pair, and does not just show a message of any role."""
    of_no_role: list[dict[str, object]] = [
        {"role": "zq7first", "content": _QUERY},
        {"role": "zq7second", "content": _DOCUMENT},
    ]
    return _carries_pairs(tokenizer) and not _shows(tokenizer, of_no_role)


def _shows(tokenizer: Tokenizer, messages: ChatMessages) -> bool:
    if not tokenizer.has_chat_template:
        return False
    try:
        text = tokenizer.render_chat(messages)
    except MachdError:
        return False
    return text.count(_QUERY) == text.count(_DOCUMENT) == 1
