"""The ceiling: a bare loop around the model, which no server on the same machine can beat by much.

Prompts are prefilled in one call, then each step is one forward pass and one argmax, evaluated and
read before the next begins. There is no sampler, text, scheduler or network: the difference to a
server's step is the server's own cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice, pairwise
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import make_prompt_cache

from machd.clock import Clock, SystemClock
from machd.engine.backend.untyped import Cache, LanguageModel

_WARM_UP_STEPS = 2


@dataclass(frozen=True, slots=True)
class CeilingReading:
    """One run of the bare loop.

    Attributes:
        prefill_s: Time to every row's first token.
        step_s: Time of each following step, which gives every row one token.
    """

    batch_width: int
    prompt_tokens: int
    prefill_s: float
    step_s: tuple[float, ...]


def _computed(model: LanguageModel, token_ids: mx.array, caches: list[Cache]) -> mx.array:
    logits: mx.array = model(token_ids, cache=caches)
    return logits


class BareLoop:
    """A model and nothing around it. Used on one thread, the one that loaded the model."""

    def __init__(self, model: Module, *, clock: Clock | None = None) -> None:
        self._model = model
        self._forward = partial(_computed, model)
        self._clock = clock or SystemClock()
        self._warm_widths: set[int] = set()

    def measure(self, prompts: Sequence[Sequence[int]], *, steps: int) -> CeilingReading:
        """Prefill rows of one length and decode so many steps, after a discarded short run the first time at a width."""
        assert prompts, "a batch has a row"
        assert prompts[0], "a prompt has a token"
        width = len(prompts)
        rows = mx.array([list(prompt) for prompt in prompts], dtype=mx.int32)
        mx.eval(rows)
        if width not in self._warm_widths:
            self._run(rows, _WARM_UP_STEPS)
            self._warm_widths.add(width)
        return self._run(rows, steps)

    def _run(self, prompts: mx.array, steps: int) -> CeilingReading:
        width, prompt_tokens = prompts.shape
        caches: list[Any] = make_prompt_cache(self._model)
        readings_s = [self._clock.monotonic_s()]
        if prompt_tokens > 1:
            # Keys and values alone: the output head over a whole prompt would be wasted.
            self._forward(prompts[:, :-1], caches)
            mx.eval([cache.state for cache in caches])
        token_ids = prompts[:, -1]
        for _ in range(steps + 1):
            token_ids = mx.argmax(self._forward(token_ids[:, None], caches)[:, -1, :], axis=-1)
            token_ids.tolist()
            readings_s.append(self._clock.monotonic_s())
        mx.clear_cache()
        spans_s = [after - before for before, after in pairwise(readings_s)]
        return CeilingReading(width, prompt_tokens, spans_s[0], tuple(spans_s[1:]))


def equal_lengths(prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Cut prompts, or repeat them, to their mean length: one call takes rows of one length.

    The sum of the lengths stays, so a loop over them does the work of a server that takes the prompts
    as they are.
    """
    length = max(1, round(sum(map(len, prompts)) / len(prompts)))
    return [list(islice(cycle(prompt), length)) for prompt in prompts]
