"""Sampling of draft tokens from a draft model's logits as the row's own tokens are sampled.

Made by the assembly for draft models in speculation/. Grammars and limits of thinking are left out: a
draft token that they do not allow is rejected, and changes no answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import mlx.core as mx

from machd.engine.sampling.row_sampling import RowSampling
from machd.engine.sampling.sampler import Sampler, Selection
from machd.request.generation import SamplingParams


class RowDraws:
    """One row's draws; see :class:`machd.engine.speculation.draws.DraftDraws`."""

    def __init__(
        self, prompt: Sequence[int], sampling: SamplingParams, vocabulary_tokens: int
    ) -> None:
        """Begin before the first token.

        Args:
            prompt: Token ids that penalties count.
            sampling: The row's parameters.
            vocabulary_tokens: Width of the served model's logits; no draft token is beyond it.
        """
        params = replace(sampling, grammar=None, thinking=None, top_logprobs=None)
        self._row = RowSampling.for_prompt(params, prompt, vocabulary_tokens)
        self._vocabulary_tokens = vocabulary_tokens
        self._sampler = Sampler([self._row], vocabulary_tokens)
        self._generated = self._row.fork()

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append tokens that the row has generated; drafts after them are rolled back."""
        self.roll_back()
        self._row.add(token_ids)
        self._generated = self._row.fork()

    def choose(self, logits: mx.array) -> Selection:
        """Draw the next draft token, lazily.

        Args:
            logits: [1, n] of the draft model; n may differ from the served vocabulary.
        """
        missing = self._vocabulary_tokens - logits.shape[-1]
        if missing > 0:
            logits = mx.pad(logits, [(0, 0), (0, missing)], constant_values=-mx.inf)
        return self._sampler.sample(logits[:, : self._vocabulary_tokens])

    def roll_back(self) -> None:
        """Drop all drafts after the last generated token."""
        self._row.take(self._generated)
