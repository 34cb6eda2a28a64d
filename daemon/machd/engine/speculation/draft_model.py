"""Draft tokens of a small model that reads the same tokens as the served one.

It has caches of its own for each row. They hold the row's tokens and, after a proposal, the drafts, which
are rolled back when the row goes on otherwise. Caches that cannot be rolled back are filled anew.

Tokens that it has not read yet are read when drafts are asked for, one chunk each time; it proposes
nothing until it has read them all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import mlx.core as mx

from machd.engine.backend.untyped import Cache, LanguageModel
from machd.engine.kernels.fused_llama import fuse_layers
from machd.engine.kv.rollback import CacheCheckpoint, supports_rollback
from machd.engine.kv.row_caches import innermost, kv_arrays, make_row_caches
from machd.engine.loading.loader import LoadedModel
from machd.engine.protocol.step import ProposerKind
from machd.engine.speculation.draws import DraftDraws, OpenDraws, drawn_tokens
from machd.request.generation import SamplingParams

_CHUNK_TOKENS = 256
"""Tokens read at a time. More would hold up the row's tokens for longer, fewer cost more passes."""

_HEADED_TOKENS = 16
"""Tokens up to which a pass with the output head over all costs less than another for the last."""

_KEPT_TOKENS = 256
"""Tokens that a row may generate without a draft before its caches are dropped."""


class DraftModelProposer:
    """Proposer with a second, smaller model for any number of rows."""

    def __init__(
        self, loaded: LoadedModel, *, open_draws: OpenDraws, end_token_ids: Iterable[int] = ()
    ) -> None:
        """Take over a loaded model, whose vocabulary is the served one's; nothing is drafted behind an end token."""
        if loaded.description.backend == "cpu":
            fuse_layers(loaded.model)
        self._model: LanguageModel = loaded.model
        self._context_tokens = loaded.description.context_tokens
        self._readable_tokens = loaded.description.vocabulary_tokens
        self.open_draws = open_draws
        self._end_token_ids = frozenset(end_token_ids)

    @property
    def kind(self) -> ProposerKind:
        """A draft model."""
        return ProposerKind.DRAFT

    def open(self, prompt: Sequence[int], sampling: SamplingParams) -> _DraftRow:
        """Begin with a row; nothing is computed or cached before the first proposal."""
        return _DraftRow(self, prompt, sampling)

    def close(self) -> None:
        """Drop the weights."""
        self._model = None
        mx.clear_cache()

    def make_caches(self) -> _DraftCaches:
        """Empty caches of one row."""
        return _DraftCaches(self._model)

    def room(self, length: int) -> int:
        """Return the tokens that fit into the draft model's context behind ``length``."""
        return max(0, self._context_tokens - length)

    def can_read(self, token_ids: Sequence[int]) -> bool:
        """Return True if the draft model has all these tokens; the served one may have more."""
        return max(token_ids, default=0) < self._readable_tokens

    def until_end(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        """The tokens up to the first that ends a completion, with it."""
        ends = (i for i, one in enumerate(token_ids) if one in self._end_token_ids)
        return tuple(token_ids[: next(ends, len(token_ids)) + 1])

    def forward(self, token_ids: mx.array, caches: Sequence[Cache]) -> mx.array:
        """Logits [1, n, vocabulary] of int32 [1, n]."""
        logits: mx.array = self._model(token_ids, cache=list(caches))
        return logits


class _DraftRow:
    """Draft tokens of one row."""

    def __init__(
        self, proposer: DraftModelProposer, prompt: Sequence[int], sampling: SamplingParams
    ) -> None:
        self._proposer = proposer
        self._sampling = sampling
        self._token_ids = list(prompt)
        self._prompt_tokens = len(prompt)
        self._draws: DraftDraws | None = None
        self._drawn_tokens = len(prompt)
        self._caches: _DraftCaches | None = None
        self._unasked_tokens = 0
        self._is_readable = proposer.can_read([*prompt, *sampling.forced_token_ids])

    @property
    def kv_bytes(self) -> int:
        return 0 if self._caches is None else self._caches.nbytes

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append generated tokens; without proposals for long, the caches are dropped."""
        self._token_ids.extend(token_ids)
        self._is_readable = self._is_readable and self._proposer.can_read(token_ids)
        self._unasked_tokens += len(token_ids)
        if self._unasked_tokens > _KEPT_TOKENS:
            self._caches = None

    def propose(self, max_tokens: int) -> tuple[int, ...]:
        """Propose the model's next tokens; empty while it has a lot to read or cannot continue.

        Raises:
            FloatingPointError: Its logits are not finite.
        """
        self._unasked_tokens = 0
        count = min(max_tokens, self._proposer.room(len(self._token_ids)))
        if not self._is_readable or count < 1:
            self._caches = None
            return ()
        caches = self._caches = self._caches or self._proposer.make_caches()
        logits = self._catch_up(caches)
        return () if logits is None else self._draw(caches, logits, count)

    def close(self) -> None:
        self._caches = None

    def _catch_up(self, caches: _DraftCaches) -> mx.array | None:
        """Read on; logits [1, n] after the row's last token, or None where there is more to read."""
        caches.roll_back(self._token_ids)
        waiting = self._token_ids[caches.length :]
        if len(waiting) > _HEADED_TOKENS:
            # Unread logits are not computed: the output head would cost a fifth.
            chunk = waiting[:-1][:_CHUNK_TOKENS]
            self._proposer.forward(mx.array([chunk], dtype=mx.int32), caches.layers)
            caches.wait()
            caches.length += len(chunk)
            return None
        if waiting:
            token_ids = mx.array([waiting], dtype=mx.int32)
            caches.logits = self._proposer.forward(token_ids, caches.layers)[:, -1, :]
            caches.length += len(waiting)
        return caches.logits

    def _draw(self, caches: _DraftCaches, logits: mx.array, count: int) -> tuple[int, ...]:
        """Draw token after token, each from the logits after the one before."""
        draws = self._current_draws()
        if count > 1:
            caches.checkpoint()
        chosen = [draws.choose(logits)]
        while len(chosen) < count:
            last = chosen[-1].token_ids
            mx.async_eval(last)
            logits = self._proposer.forward(last[None], caches.layers)[:, -1, :]
            chosen.append(draws.choose(logits))
        draws.roll_back()
        token_ids = drawn_tokens(chosen)
        caches.drafted = token_ids[:-1]
        return self._proposer.until_end(token_ids)

    def _current_draws(self) -> DraftDraws:
        if self._draws is None:
            prompt = self._token_ids[: self._prompt_tokens]
            self._draws = self._proposer.open_draws(prompt, self._sampling)
        self._draws.extend(self._token_ids[self._drawn_tokens :])
        self._drawn_tokens = len(self._token_ids)
        return self._draws


class _DraftCaches:
    """A row's caches in the draft model.

    Attributes:
        layers: One for each cache of the model.
        length: The row's tokens in the caches, from its first on.
        drafted: Draft tokens in the caches behind them.
        logits: [1, n] after the last of ``length`` tokens; None unless they were computed.
    """

    def __init__(self, model: LanguageModel) -> None:
        self._model = model
        self.layers: list[Cache] = []
        self.length = 0
        self.drafted: list[int] = []
        self.logits: mx.array | None = None
        self._checkpoint: CacheCheckpoint | None = None
        self._empty()

    @property
    def nbytes(self) -> int:
        """Bytes of the caches, and of what is remembered of those that cannot be cut."""
        held = sum(int(cache.nbytes) for cache in self.layers)
        if self._checkpoint is None:
            return held
        uncut = (one for one in innermost(self.layers) if kv_arrays(one) is None)
        return held + sum(int(cache.nbytes) for cache in uncut)

    def wait(self) -> None:
        mx.eval([cache.state for cache in self.layers])

    def checkpoint(self) -> None:
        inner = innermost(self.layers)
        self._checkpoint = CacheCheckpoint.of(inner) if all(map(supports_rollback, inner)) else None

    def roll_back(self, token_ids: Sequence[int]) -> None:
        """Remove drafts from the caches that differ from these tokens of the row.

        The row's last token stays out as well, so that its logits can be computed.
        """
        right = _common_tokens(self.drafted, token_ids[self.length : -1])
        if right < len(self.drafted):
            right = self._cut(right)
        self.length += right
        self.drafted = []

    def _cut(self, right: int) -> int:
        """Roll back all drafts but the first ``right``, or those too; returns how many stay."""
        checkpoint, self._checkpoint = self._checkpoint, None
        if checkpoint is None:
            self._empty()
            return 0
        drafted = len(self.drafted)
        return right if checkpoint.roll_back([drafted - right], [drafted]) else 0

    def _empty(self) -> None:
        self.layers = make_row_caches(self._model)
        self.length = 0


def _common_tokens(ones: Sequence[int], others: Sequence[int]) -> int:
    """Return the length of the common beginning of two texts."""
    count = 0
    for one, other in zip(ones, others, strict=False):
        if one != other:
            break
        count += 1
    return count
