"""How guesses are drawn: as the row's own tokens are, but from another model's logits.

The row's token at a position is a function of its logits, its parameters and a draw that its seed and
the position decide. A guess that takes the same parameters and the same draw is right as often as two
models' distributions agree, whether the row is greedy or not. Grammars and thoughts are left out: a
guess that they do not allow is a wrong one, and costs no answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import mlx.core as mx

from machd.engine.protocol.sampling import SamplingParams
from machd.engine.step.sampling import RowSampling, Sampler, Selection


class RowDraws:
    """One row's, from what it has said on."""

    def __init__(
        self, prompt: Sequence[int], sampling: SamplingParams, vocabulary_tokens: int
    ) -> None:
        """Begin where the row has said nothing.

        Args:
            prompt: Its tokens, which penalties are of.
            sampling: How its tokens are chosen.
            vocabulary_tokens: Width of the served model's logits: no guess is beyond it.
        """
        params = replace(sampling, grammar=None, thinking=None, top_logprobs=None)
        self._row = RowSampling.for_prompt(params, prompt, vocabulary_tokens)
        self._vocabulary_tokens = vocabulary_tokens
        self._sampler = Sampler([self._row], vocabulary_tokens)
        self._said = self._row.state

    def say(self, token_ids: Sequence[int]) -> None:
        """The row has said these; guesses are taken back."""
        self.take_back()
        self._row.add(token_ids)
        self._said = self._row.state

    def choose(self, logits: mx.array) -> Selection:
        """Guess the next token after those that were said and guessed; nothing is computed yet.

        Args:
            logits: [1, n] of the model that guesses, which may have ids that nobody serves, or lack
                some.
        """
        return self._sampler.sample(self._fitted(logits))

    def take_back(self) -> None:
        """Forget all guesses since the last said token."""
        self._row.state = self._said

    def _fitted(self, logits: mx.array) -> mx.array:
        missing = self._vocabulary_tokens - logits.shape[-1]
        if missing > 0:
            return mx.pad(logits, [(0, 0), (0, missing)], constant_values=-mx.inf)
        return logits[:, : self._vocabulary_tokens]


def drawn_tokens(chosen: Sequence[Selection]) -> list[int]:
    """Wait for what was chosen of one row, token after token.

    Raises:
        FloatingPointError: The logits are not numbers.
    """
    mx.eval([array for one in chosen for array in one.arrays])
    if not all(bool(one.usable[0]) for one in chosen):
        raise FloatingPointError("the logits that guesses are drawn from are not numbers")
    return [int(one.token_ids[0]) for one in chosen]
