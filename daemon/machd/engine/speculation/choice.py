"""Choice of the proposer that ``speculation.mode`` asks for, as far as this machine and model allow."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import structlog

from machd.capabilities.rules import speculation
from machd.capabilities.verdict import Support
from machd.engine.loading.loader import LoadedModel, load_model
from machd.engine.loading.source import resolve_model
from machd.engine.protocol.progress import LoadProgress
from machd.engine.protocol.step import ProposerKind
from machd.engine.speculation.dflash import DFlashProposer
from machd.engine.speculation.dflash_package import dflash_obstacle, known_draft, load_block_draft
from machd.engine.speculation.draft_model import DraftModelProposer
from machd.engine.speculation.draws import OpenDraws
from machd.engine.speculation.ngram import NgramProposer
from machd.engine.speculation.vocabulary import check_vocabulary
from machd.errors import ModelError
from machd.settings.model import Settings

Proposer: TypeAlias = NgramProposer | DraftModelProposer | DFlashProposer

_EMPTY_TEMPLATE = "none"
"""A draft model never renders messages."""


@dataclass(frozen=True, slots=True)
class ProposerChoice:
    """A proposer, or None for no drafts, and why, for the operator."""

    proposer: Proposer | None
    reason: str


def choose_proposer(
    settings: Settings,
    loaded: LoadedModel,
    *,
    open_draws: OpenDraws,
    cache_directory: Path,
    progress: LoadProgress,
) -> ProposerChoice:
    """Make the proposer that ``speculation.mode`` asks for, loading its model if it has one.

    No draft model is loaded for a served model whose caches cannot roll back.

    Raises:
        SettingsError: The draft model does not fit the served one.
        ModelError: The draft model cannot be loaded.
    """
    kind = _asked_kind(settings)
    if kind is ProposerKind.OFF:
        return ProposerChoice(None, "speculation.mode is off")
    verdict = speculation(loaded.description.cache)
    if verdict.support is Support.BLOCKED:
        return ProposerChoice(None, verdict.reason)
    if kind is ProposerKind.NGRAM:
        reason = "tokens that followed the same ones before, in prompt and completion, are drafted"
        return ProposerChoice(NgramProposer(), reason)
    draft_progress = _DraftProgress(progress)
    if kind is ProposerKind.DRAFT:
        return _draft(settings, loaded, open_draws, cache_directory, draft_progress)
    return _dflash(settings, loaded, open_draws, cache_directory, draft_progress)


def _asked_kind(settings: Settings) -> ProposerKind:
    section = settings.speculation
    if section.mode != "auto":
        return ProposerKind(section.mode)
    return ProposerKind.NGRAM if section.draft_model is None else ProposerKind.DRAFT


def _draft(
    settings: Settings,
    loaded: LoadedModel,
    open_draws: OpenDraws,
    cache_directory: Path,
    progress: LoadProgress,
) -> ProposerChoice:
    model = settings.model
    name = settings.speculation.draft_model
    assert name is not None, "settings name a draft model where one is asked for"
    try:
        source = resolve_model(
            name, offline=model.offline, cache_directory=cache_directory, progress=progress
        )
        draft = load_model(
            source,
            dtype=model.dtype,
            trust_remote_code=model.trust_remote_code,
            chat_template=_EMPTY_TEMPLATE,
            progress=progress,
        )
    except ModelError as error:
        raise _of_draft(error) from error
    for note in draft.notes:
        _log_note(f"the draft model: {note}")
    check_vocabulary(loaded.tokenizer, draft.tokenizer)
    proposer = DraftModelProposer(
        draft,
        open_draws=open_draws,
        end_token_ids=loaded.description.eos_token_ids,
    )
    size = f"{draft.description.parameters / 1e6:.0f} million parameters"
    reason = f"the model at speculation.draft_model drafts: {size}, {draft.description.dtype}"
    return ProposerChoice(proposer, reason)


def _dflash(
    settings: Settings,
    loaded: LoadedModel,
    open_draws: OpenDraws,
    cache_directory: Path,
    progress: LoadProgress,
) -> ProposerChoice:
    obstacle = dflash_obstacle(loaded.description.backend)
    if obstacle is not None:
        return ProposerChoice(None, obstacle)
    named = settings.speculation.draft_model
    name = named or known_draft(loaded.description.model_id)
    if name is None:
        return ProposerChoice(
            None,
            "dflash-mlx knows no draft for the model at model.path; name one in "
            "speculation.draft_model, or set speculation.mode to auto",
        )
    offline = settings.model.offline
    try:
        source = resolve_model(
            name, offline=offline, cache_directory=cache_directory, progress=progress
        )
    except ModelError as error:
        if named is None:
            return ProposerChoice(None, f"the DFlash draft of the model: {error.message}")
        raise _of_draft(error) from error
    progress.stage("loading the weights", None)
    draft = load_block_draft(loaded, source.path)
    reason = f"a DFlash draft proposes {draft.block_tokens} tokens at once"
    return ProposerChoice(DFlashProposer(draft, open_draws=open_draws), reason)


def _of_draft(error: ModelError) -> ModelError:
    """Return the same error with the draft model's setting in front."""
    return type(error)(f"speculation.draft_model: {error.message}")


def _log_note(note: str) -> None:
    structlog.get_logger("machd.engine").warning("model.note", note=note)


class _DraftProgress:
    """Progress whose stages are named as the draft model's."""

    def __init__(self, progress: LoadProgress) -> None:
        self._progress = progress

    def stage(self, name: str, total_bytes: int | None) -> None:
        """Begin a stage of loading the draft model."""
        self._progress.stage(f"draft model: {name}", total_bytes)

    def advance(self, done_bytes: int) -> None:
        """Report loaded bytes."""
        self._progress.advance(done_bytes)
