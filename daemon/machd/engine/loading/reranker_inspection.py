"""Inspection of a reranker that generates: what serving would find in its files and its tokenizer."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass

from machd.engine.backend.own_code import OwnCode
from machd.engine.loading.formats.opening import open_model
from machd.engine.loading.module_list import LOGIT_SCORE, listed_modules
from machd.engine.loading.reranker import read_reranker
from machd.engine.loading.source import ModelSource, SourceKind
from machd.engine.loading.tokenizer_files import open_tokenizer
from machd.engine.protocol.reranker import RerankerDescription
from machd.errors import ChatTemplateMissingError


@dataclass(frozen=True, slots=True)
class RerankerInspection:
    """What is known of how a model scores documents.

    Attributes:
        description: As serve would have it; None for a model that serve would refuse to rerank with.
        true_token: Text of the token that calls a document relevant; empty without a description.
        false_token: Text of the other one.
        notes: Why documents cannot be scored.
    """

    description: RerankerDescription | None = None
    true_token: str = ""
    false_token: str = ""
    notes: tuple[str, ...] = ()


def names_reranker(source: ModelSource, *, kind: str) -> bool:
    """Return True if the files or the setting call a model a reranker; no tokenizer is read.

    Args:
        source: The model's files.
        kind: ``model.kind``.

    Raises:
        ModelError: ``modules.json`` is broken.
    """
    if kind == "reranker":
        return True
    modules = listed_modules(source.path) if source.kind is SourceKind.DIRECTORY else None
    return any(name == LOGIT_SCORE for name, _ in modules or ())


def inspect_reranker(
    source: ModelSource, *, kind: str, chat_template: str | None
) -> RerankerInspection:
    """Read a reranker's tokenizer, and what :func:`machd.engine.loading.reranker.read_reranker` makes of its files.

    Args:
        source: The model's files, which were inspected.
        kind: ``model.kind``.
        chat_template: ``model.chat_template``.

    Raises:
        ModelError: The tokenizer cannot be read.
        SettingsError: ``model.kind`` calls a model a reranker that cannot read a reranker's prompt.
    """
    checkpoint = open_model(source, own_code=OwnCode.NEVER_RUN).checkpoint
    try:
        tokenizer, _ = open_tokenizer(checkpoint, chat_template, trust_remote_code=False)
    except ChatTemplateMissingError:
        return RerankerInspection()  # what the template's own inspection says, serve says, too
    with closing(tokenizer):
        found, notes = read_reranker(source, tokenizer, kind=kind)
        if found is None:
            return RerankerInspection(notes=notes)
        true_token, false_token = (
            tokenizer.decode([one]) for one in (found.true_token_id, found.false_token_id)
        )
    return RerankerInspection(found, true_token, false_token, notes)
