"""Sampling of draft tokens from a draft model's logits as the row's own tokens are sampled.

Made by the assembly for draft models in speculation/. Grammars and limits of thinking are left out: a
draft token that they do not allow is rejected, and changes no answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import mlx.core as mx

from machd.engine.sampling.sampler import Sampler, Selection
from machd.engine.sampling.sampling_state import SamplingState
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
        params = replace(
            sampling, grammar=None, thinking=None, top_logprobs=None, logprob_token_ids=()
        )
        self._generated = SamplingState.for_prompt(params, prompt, vocabulary_tokens)
        self._drafted = self._generated
        self._vocabulary_tokens = vocabulary_tokens
        self._sampler = Sampler([params], vocabulary_tokens)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append tokens that the row has generated; drafts after them are rolled back."""
        self._generated = self._generated.after(token_ids)
        self.roll_back()

    def choose(self, logits: mx.array) -> Selection:
        """Draw the next draft token, lazily.

        Args:
            logits: [1, n] of the draft model; n may differ from the served vocabulary.
        """
        missing = self._vocabulary_tokens - logits.shape[-1]
        if missing > 0:
            logits = mx.pad(logits, [(0, 0), (0, missing)], constant_values=-mx.inf)
        selection = self._sampler.sample([self._drafted], logits[:, : self._vocabulary_tokens])
        self._drafted = self._drafted.after(selection.token_ids)
        return selection

    def roll_back(self) -> None:
        """Drop all drafts after the last generated token."""
        self._drafted = self._generated
