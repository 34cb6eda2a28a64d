"""A block draft that hears a model's layers, as DFlash drafts do, without dflash-mlx."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from machd.engine.backend.untyped import Cache, LanguageModel
from machd.engine.kv.row_caches import make_row_caches
from machd.engine.speculation.dflash import BlockReader
from machd_probes.passes import restored, snapshot

_BLOCK_TOKENS = 4
_WRONG_EVERY = 3


class HearingDraft:
    """Runs the served model on a row and drafts its next tokens, one of three wrong."""

    block_tokens = _BLOCK_TOKENS

    def __init__(self, model: LanguageModel, vocabulary_tokens: int) -> None:
        """Listen in a model."""
        self.model = model
        self.vocabulary_tokens = vocabulary_tokens
        self.blocks = 0

    def open(self) -> BlockReader:
        """Begin with a row."""
        return _HearingReader(self)


class _HearingReader:
    def __init__(self, draft: HearingDraft) -> None:
        self._draft = draft
        self._caches: list[Cache] = make_row_caches(draft.model)

    @property
    def nbytes(self) -> int:
        return sum(int(cache.nbytes) for cache in self._caches)

    def read(self, token_ids: Sequence[int]) -> None:
        self._logits(self._caches, token_ids)

    def block_logits(self, last_token_id: int, count: int) -> mx.array:
        """Return logits of the model's next tokens, computed in copies of the caches."""
        caches = restored(make_row_caches(self._draft.model), snapshot(self._caches))
        token_id, rows = last_token_id, []
        for _ in range(count):
            logits = self._logits(caches, [token_id])
            token_id = int(str(mx.argmax(logits).item()))
            self._draft.blocks += 1
            wrong = self._draft.blocks % _WRONG_EVERY == 0
            said = (token_id + 1) % self._draft.vocabulary_tokens if wrong else token_id
            rows.append(mx.where(mx.arange(logits.size) == said, 9.0, -9.0))
        return mx.stack(rows)

    def _logits(self, caches: list[Cache], token_ids: Sequence[int]) -> mx.array:
        output = self._draft.model(mx.array([list(token_ids)], dtype=mx.int32), cache=caches)
        logits: mx.array = getattr(output, "logits", output)[0, -1]
        mx.eval(logits, [cache.state for cache in caches])
        return logits
