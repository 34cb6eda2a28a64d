"""The ceiling: a bare loop around the model, which no server on the same machine can beat by much.

Prompts are prefilled in one call, then each step is one forward pass and one argmax, evaluated and
read before the next begins. No sampler, no text, no scheduler, no network: what a server adds to a
step's time is its own cost.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import make_prompt_cache

from machd.clock import Clock, SystemClock
from machd.engine.decoder import Forward

__all__ = ["BareLoop", "CeilingReading"]

_WARM_UP_STEPS = 2


@dataclass(frozen=True, slots=True)
class CeilingReading:
    """One run of the bare loop.

    Attributes:
        batch_width: Rows of equal length that were computed together.
        prompt_tokens: Tokens of each row's prompt.
        prefill_s: From the prompts to every row's first token.
        step_s: Seconds of each following step, which gives every row one token.
    """

    batch_width: int
    prompt_tokens: int
    prefill_s: float
    step_s: tuple[float, ...]


class BareLoop:
    """A model and nothing around it. Used on one thread, the one that loaded the model."""

    def __init__(
        self, model: Module, *, vocabulary_tokens: int, clock: Clock | None = None
    ) -> None:
        """Borrow a loaded model.

        Args:
            model: An mlx-lm model.
            vocabulary_tokens: Width of its logits.
            clock: Reads time; the machine's clocks unless given.
        """
        self._model = model
        self._forward: Forward = lambda token_ids, caches: model(token_ids, cache=caches)
        self._vocabulary_tokens = vocabulary_tokens
        self._clock = clock or SystemClock()
        self._warm_widths: set[int] = set()

    def measure(self, *, batch_width: int, prompt_tokens: int, steps: int) -> CeilingReading:
        """Prefill and decode once, after a discarded short run the first time at a width.

        Args:
            batch_width: Rows, 1 or more.
            prompt_tokens: Tokens of each prompt, 1 or more.
            steps: Steps after the first token.
        """
        assert batch_width >= 1, "a batch has a row"
        assert prompt_tokens >= 1, "a prompt has a token"
        if batch_width not in self._warm_widths:
            self._run(batch_width, prompt_tokens, _WARM_UP_STEPS)
            self._warm_widths.add(batch_width)
        return self._run(batch_width, prompt_tokens, steps)

    def _run(self, batch_width: int, prompt_tokens: int, steps: int) -> CeilingReading:
        caches: list[Any] = make_prompt_cache(self._model)
        prompts = self._prompts(batch_width, prompt_tokens)
        readings_s = [self._clock.monotonic_s()]
        if prompt_tokens > 1:
            # Keys and values alone: the output head over a whole prompt is work for nobody.
            self._forward(prompts[:, :-1], caches)
            mx.eval([cache.state for cache in caches])
        token_ids = prompts[:, -1]
        for _ in range(steps + 1):
            token_ids = mx.argmax(self._forward(token_ids[:, None], caches)[:, -1, :], axis=-1)
            token_ids.tolist()
            readings_s.append(self._clock.monotonic_s())
        mx.clear_cache()
        spans_s = [after - before for before, after in pairwise(readings_s)]
        return CeilingReading(batch_width, prompt_tokens, spans_s[0], tuple(spans_s[1:]))

    def _prompts(self, batch_width: int, prompt_tokens: int) -> mx.array:
        """Token ids int32 [width, tokens], the same every time and different in every row."""
        count = batch_width * prompt_tokens
        # Any odd stride spreads the ids over the vocabulary.
        token_ids = mx.arange(1, count + 1, dtype=mx.int32) * 31 % self._vocabulary_tokens
        prompts = token_ids.reshape(batch_width, prompt_tokens)
        mx.eval(prompts)
        return prompts
