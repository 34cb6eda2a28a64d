"""Forward passes of a model with caches that a probe holds itself, outside of the engine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import make_prompt_cache
from numpy.typing import NDArray

from machd.capabilities.evidence import Evidence
from machd.engine.backend.untyped import Cache, LanguageModel
from machd_probes.bounded import Watch, without_end

Logprobs = NDArray[np.float32]
"""Natural-log probabilities [tokens, vocabulary]."""


class Passes:
    """A model, called with chunks of a row."""

    def __init__(self, model: Module, watch: Watch = without_end) -> None:
        """Borrow the model; ``watch`` is called before each pass."""
        self._model: LanguageModel = model
        self._watch = watch

    def new_caches(self) -> list[Cache]:
        """The model's own, empty."""
        return list(make_prompt_cache(self._model))

    def feed(self, token_ids: Sequence[int], caches: list[Cache] | None) -> Logprobs:
        """Log-probabilities after each token; the caches grow by the chunk. None is no cache."""
        self._watch()
        output = self._model(mx.array([list(token_ids)], dtype=mx.int32), cache=caches)
        logits = getattr(output, "logits", output)[0].astype(mx.float32)
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        mx.eval(logprobs, [cache.state for cache in caches or [] if _has_state(cache)])
        return np.array(logprobs)

    def continued(self, token_ids: Sequence[int], caches: list[Cache]) -> Logprobs:
        """The same token by token, as a row decodes."""
        return np.concatenate([self.feed([token_id], caches) for token_id in token_ids])


def snapshot(caches: list[Cache]) -> list[object]:
    """The state of each cache, in arrays that nothing will change."""
    return [_copied(cache.state) for cache in caches]


def restored(caches: list[Cache], states: Sequence[object]) -> list[Cache]:
    """New caches of the classes of ``caches``, with these states."""
    return [
        type(cache).from_state(_copied(state)) for cache, state in zip(caches, states, strict=True)
    ]


_ROUNDINGS = 128
"""Roundings of a usual number by which two orders of sums may differ; some 30 were measured on tiny models."""


def rounding_floor(passes: Iterable[Logprobs]) -> float:
    """Return what rounding may change where another library adds in another order, in nats."""
    # The median: what a model never says may have any number, such as -1e9.
    usual = max(float(np.median(np.abs(one))) for one in passes)
    return _ROUNDINGS * float(np.finfo(np.float32).eps) * usual


def compared_passes(alone: Logprobs, other: Logprobs, noise_floor: float, slack: float) -> Evidence:
    """Compare two ways of computing the same positions.

    Args:
        alone: The reference.
        other: What is judged.
        noise_floor: In nats.
        slack: Margins up to this do not decide a token, in nats.
    """
    # Tokens that a model rules out are at minus infinity in both.
    apart = np.where(alone == other, 0.0, other) - np.where(alone == other, 0.0, alone)
    difference = float(np.max(np.abs(apart))) if alone.size else 0.0
    best = np.sort(alone, axis=-1)[:, -2:]
    is_decided = best[:, 1] - best[:, 0] > slack
    is_other = np.argmax(alone, axis=-1) != np.argmax(other, axis=-1)
    return Evidence(
        token_mismatches=int(np.sum(is_decided & is_other)),
        max_logprob_diff=difference,
        noise_floor=noise_floor,
        cases=1,
    )


def _has_state(cache: Cache) -> bool:
    try:
        return cache.state is not None
    except AttributeError:  # a cache that this model never fills
        return False


def _copied(state: object) -> object:
    if isinstance(state, mx.array):
        copied = mx.array(np.array(state)) if state.dtype == mx.float32 else state + 0
        mx.eval(copied)
        return copied
    if isinstance(state, list | tuple):
        return type(state)([_copied(inner) for inner in state])
    return state
