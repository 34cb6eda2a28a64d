"""Log-probabilities of a prompt's tokens, while its chunks go through the model.

The logits after token i say how likely token i + 1 was. They are computed for a few positions at a
time, so that memory does not grow with prompt x vocabulary; the logits after the last token of a
chunk are kept for the first token of the next one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import mlx.core as mx

from machd.engine.backend.untyped import Cache
from machd.engine.protocol.step import (
    PrefillChunk,
    PromptLogprob,
    RowOutput,
    ScoredPrompt,
)
from machd.engine.sampling.logprobs import score_tokens
from machd.engine.step.decode_pass import NO_FEATURES, Forward

_PASS_TOKENS = 128
"""Prompt tokens in one pass at the most. Each pass reads all weights, so fewer cost time."""

_MAX_LOGITS_BYTES = 32 << 20
"""Bytes of float32 logits that a pass may make: a large vocabulary makes passes shorter."""

_LOGITS_COPIES = 4
"""Arrays as large as its logits that a pass needs at once, rounded up from what was measured."""

_FLOAT_BYTES = 4


class PromptScores:
    """The log-probabilities of one prompt's tokens."""

    def __init__(self, first_chunk: PrefillChunk, vocabulary_tokens: int) -> None:
        """Begin before the prompt's first token, which has no log-probability.

        Args:
            first_chunk: The row's first chunk.
            vocabulary_tokens: Width of the logits.
        """
        self._slot_index = first_chunk.slot_index
        self._prompt_tokens = first_chunk.opened_tokens
        self._top_logprobs = min(first_chunk.sampling.prompt_logprobs or 0, vocabulary_tokens)
        self._pass_tokens = _pass_tokens(vocabulary_tokens)
        self._scored: list[PromptLogprob] = []
        self._last_logits: mx.array | None = None  # float32 [1, vocabulary]

    def compute(
        self,
        forward: Forward,
        caches: Sequence[Cache],
        token_ids: Sequence[int],
        computed_tokens: int,
    ) -> list[RowOutput]:
        """Compute a chunk, wait for it, and score its tokens; returns all scores with the prompt's last chunk.

        Args:
            forward: The model.
            caches: Of the row.
            token_ids: The chunk's tokens.
            computed_tokens: How many of them go through the model: all, or all but the last one.

        Raises:
            FloatingPointError: The logits are not numbers.
        """
        if self._last_logits is not None:
            self._score(self._last_logits, token_ids[:1])
        for start in range(0, computed_tokens, self._pass_tokens):
            stop = min(start + self._pass_tokens, computed_tokens)
            inputs = mx.array([token_ids[start:stop]], dtype=mx.int32)
            logits = forward(inputs, list(caches), NO_FEATURES)[0]  # [positions, vocabulary]
            logits = logits.astype(mx.float32)
            targets = token_ids[start + 1 : stop + 1]
            if targets:
                self._score(logits[: len(targets)], targets)
            # `take` copies: a slice would keep the logits of the whole pass in memory.
            self._last_logits = mx.take(logits, mx.array([stop - start - 1]), axis=0)
            mx.eval(self._last_logits, [cache.state for cache in caches])
        if len(self._scored) < self._prompt_tokens - 1:
            return []
        return [ScoredPrompt(self._slot_index, tuple(self._scored))]

    def _score(self, logits: mx.array, targets: Sequence[int]) -> None:
        position = len(self._scored) + 1
        self._scored += score_tokens(logits, targets, position, self._top_logprobs)


def scoring_bytes(chunks: Iterable[PrefillChunk], vocabulary_tokens: int) -> int:
    """An upper estimate of what passes over the scored ones of these chunks take besides the passes themselves."""
    prompt_tokens = max((len(one.token_ids) for one in chunks if one.is_scored), default=0)
    positions = min(prompt_tokens, _pass_tokens(vocabulary_tokens))
    return positions * vocabulary_tokens * _FLOAT_BYTES * _LOGITS_COPIES


def _pass_tokens(vocabulary_tokens: int) -> int:
    fitting = _MAX_LOGITS_BYTES // (vocabulary_tokens * _FLOAT_BYTES)
    return max(1, min(_PASS_TOKENS, fitting))
