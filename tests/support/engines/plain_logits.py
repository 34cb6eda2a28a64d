"""Probabilities from plain logits: a whole prompt in one pass of mlx-lm's model, without a cache and without a batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import mlx.core as mx
from mlx_lm.utils import load


class PlainLogits:
    """A checkpoint as mlx-lm loads it."""

    def __init__(self, directory: Path, adapter: Path | None = None) -> None:
        """Load it, with one of mlx-lm's adapters or none."""
        # Continuations of one text share their beginnings.
        self._logprobs = lru_cache(maxsize=64)(self.logprobs)
        loaded = load(str(directory), adapter_path=None if adapter is None else str(adapter))
        self._model, self._tokenizer = loaded[0], loaded[1]

    def tokens(self, text: str) -> list[int]:
        """Tokens of a text that holds its special tokens."""
        token_ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return token_ids

    def probability(self, text: str, continuation: str) -> float:
        """Return the probability of a continuation behind a text."""
        token_ids, logprob = self.tokens(text), 0.0
        for token in self.tokens(continuation):
            logprob += self._logprobs(tuple(token_ids))[token]
            token_ids = [*token_ids, token]
        return math.exp(logprob)

    def logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """Return the log-probability of every token behind these."""
        logits = self._model(mx.array([list(token_ids)]))[0, -1].astype(mx.float32)
        values = (logits - mx.logsumexp(logits)).tolist()
        assert isinstance(values, list)
        return values
