"""Adapter to dflash-mlx, which has the layers of DFlash drafts; written against version 0.1.8.

The package knows which layers of a served model a draft reads. It drives a generation of its own, with
caches and kernels for Metal; only its drafts are used here, and the daemon verifies them.

The served model's hidden states of a row are computed a second time for the draft, without the output
head, in caches of their own. So the daemon's passes do not depend on it; it costs another pass of the
served model for each draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias

import mlx.core as mx

from machd.engine.backend.model_files import read_object
from machd.engine.backend.own_code import closed_to_own_code
from machd.engine.backend.untyped import Cache, LanguageModel
from machd.engine.kv.row_caches import make_row_caches
from machd.engine.loading.formats.checkpoint import refuse_own_model
from machd.engine.loading.loader import LoadedModel
from machd.engine.speculation.dflash import BlockDraft, BlockReader
from machd.errors import ModelFormatError, SettingsError
from machd.installed import how_to_install

_TRIAL = (1, 2, 3, 4)
"""Tokens that a draft is tried with."""

_SINK_TOKENS, _WINDOW_TOKENS = 64, 1024
"""What a draft sees of a long text by the package's own defaults: its beginning and its end."""

_Library: TypeAlias = Any
"""What dflash-mlx hands out; it has no types."""


def dflash_obstacle(backend: str) -> str | None:
    """Why no block draft can run here, in plain words; None where one can."""
    if backend != "metal":
        return (
            f"speculation.mode dflash needs dflash-mlx, which runs on Apple silicon alone, and this "
            f"daemon computes on {backend}; set speculation.mode to auto"
        )
    if find_spec("dflash_mlx") is None:
        return f"speculation.mode dflash needs dflash-mlx: {how_to_install('dflash')}"
    return None


def known_draft(model_id: str) -> str | None:
    """The hub id of the draft that the package knows for a model; None where it knows none."""
    from dflash_mlx.runtime.registry import resolve_optional_draft_ref  # noqa: PLC0415 - an extra

    found: str | None = resolve_optional_draft_ref(model_id, None)
    return found


def load_block_draft(loaded: LoadedModel, path: Path) -> BlockDraft:
    """Load a draft for a model and try it.

    Raises:
        SettingsError: The package cannot listen in the model, or the draft is another model's.
        ModelFormatError: The directory holds no draft.
        ModelCodeError: The draft is Python code of its own.
    """
    from dflash_mlx.engine.target_ops import (  # noqa: PLC0415 - an extra
        bind_draft_to_target,
        resolve_target_ops,
    )
    from dflash_mlx.runtime.loading import load_draft_bundle  # noqa: PLC0415 - the same

    try:
        ops = resolve_target_ops(loaded.model)
    except NotImplementedError as error:
        problem = (
            "speculation.mode: dflash-mlx has no drafts for the architecture of the model at "
            "model.path; set speculation.mode to auto"
        )
        raise SettingsError([problem]) from error
    refuse_own_model(read_object(path / "config.json") or {})
    try:
        with closed_to_own_code():
            draft, _ = load_draft_bundle(str(path), lazy=False)
    except Exception as error:
        # The package and mlx-lm raise whatever comes for whatever does not fit together.
        raise ModelFormatError(
            f"speculation.draft_model: it is no DFlash draft: {type(error).__name__}: {error}"
        ) from error
    bind_draft_to_target(draft, loaded.model, target_ops=ops)
    return _tried(_LibraryDraft(loaded.model, ops, draft), loaded)


def _tried(draft: _LibraryDraft, loaded: LoadedModel) -> BlockDraft:
    """Return the draft after a first block for this model."""
    try:
        reader = draft.open()
        reader.read(_TRIAL)
        logits = reader.block_logits(_TRIAL[-1], draft.block_tokens)
        mx.eval(logits)
        fits = logits.shape == (draft.block_tokens, loaded.description.vocabulary_tokens)
    except (ValueError, IndexError, KeyError) as error:
        cause: Exception | None = error
        fits = False
    else:
        cause = None
    if not (fits and draft.is_of_target):
        problem = (
            "speculation.draft_model: it is a DFlash draft of another model than the one at "
            "model.path; name the one that was made for it"
        )
        raise SettingsError([problem]) from cause
    return draft


class _LibraryDraft:
    """A draft of dflash-mlx, bound to the model that it listens in."""

    def __init__(self, model: LanguageModel, ops: _Library, draft: _Library) -> None:
        self.model = model
        self.ops = ops
        self.draft = draft
        self.layer_ids = [int(one) for one in draft.target_layer_ids]
        self.dtype: mx.Dtype = draft.norm.weight.dtype

    @property
    def block_tokens(self) -> int:
        """One place of a block is the row's last token."""
        return int(self.draft.block_size) - 1

    @property
    def is_of_target(self) -> bool:
        """Return True if the draft's configuration names a model with as many layers."""
        return int(self.draft.args.num_target_layers) == len(self.ops.text_model(self.model).layers)

    def open(self) -> BlockReader:
        return _LibraryReader(self)

    def make_caches(self) -> list[Cache]:
        """The draft's own caches; they hold read tokens and never draft tokens."""
        from dflash_mlx.draft_backend import EagerDraftBackend  # noqa: PLC0415 - an extra

        can_see_all = self.ops.capabilities_for(self.model).supports_full_context_draft_layers
        caches: list[Cache] = EagerDraftBackend().make_cache(
            draft_model=self.draft,
            sink_size=_SINK_TOKENS,
            window_size=max(_WINDOW_TOKENS, int(self.draft.args.sliding_window or 0)),
            allow_full_context_layers=can_see_all,
        )
        return caches

    def heard(self, token_ids: Sequence[int], caches: Sequence[Cache]) -> mx.array:
        """Return the hidden states that the draft reads from the model's layers: [1, tokens, width]."""
        _, captured = self.ops.forward_with_hidden_capture(
            self.model,
            input_ids=mx.array([list(token_ids)], dtype=mx.int32),
            cache=list(caches),
            capture_layer_ids={one + 1 for one in self.layer_ids},
            compute_logits=False,
        )
        features = self.ops.extract_context_feature(captured, self.layer_ids)
        projected: mx.array = self.draft.project_target_hidden(features)
        return projected.astype(self.dtype)


class _LibraryReader:
    """A row's caches in the served model and in the draft."""

    def __init__(self, bound: _LibraryDraft) -> None:
        self._bound = bound
        self._model_caches = make_row_caches(bound.model)
        self._draft_caches = bound.make_caches()
        self._heard: mx.array | None = None

    @property
    def nbytes(self) -> int:
        arrays = [one for cache in self._draft_caches for one in cache.fetch() if one is not None]
        held = sum(int(cache.nbytes) for cache in self._model_caches)
        return held + sum(int(array.nbytes) for array in arrays)

    def read(self, token_ids: Sequence[int]) -> None:
        """Compute what the draft hears; it takes that in with the next pass of its own."""
        self._take_in()
        self._heard = self._bound.heard(token_ids, self._model_caches)
        mx.eval(self._heard, [cache.state for cache in self._model_caches])

    def block_logits(self, last_token_id: int, count: int) -> mx.array:
        """Fill the places behind the last token, all at once."""
        assert self._heard is not None, "something was read since the last block"
        bound, ops, draft = self._bound, self._bound.ops, self._bound.draft
        block = mx.array([[last_token_id, *[int(draft.mask_token_id)] * count]], dtype=mx.int32)
        filled = draft.forward_projected_context(
            noise_embedding=ops.embed_tokens(bound.model)(block).astype(bound.dtype),
            draft_context=self._heard,
            cache=self._draft_caches,
        )
        self._heard = None
        logits: mx.array = ops.logits_from_hidden(bound.model, filled[:, 1:, :])
        return logits[0]

    def _take_in(self) -> None:
        if self._heard is not None:
            self._bound.draft.advance_projected_context_cache(
                draft_context=self._heard, cache=self._draft_caches
            )
