"""mlx-vlm's models behind the call of mlx-lm's: token ids and caches to logits.

mlx-vlm's language models keep rotary positions of the last prompt as attributes, which is wrong for the rows of a batch. So each call
here passes positions explicitly, where the model takes any but those of its caches.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module

from machd.engine.backend.untyped import Cache, Layer

GRIDS = ("image_grid_thw", "video_grid_thw")
"""Arrays that tell a language model the rows and columns of images and videos."""

_CLASSES = ("KVCache", "RotatingKVCache", "ArraysCache", "CacheList", "ChunkedKVCache")


class VisionLanguageModel(Module):
    """A model of mlx-vlm's, whose language model may take positions of rows, which an image moves."""

    def __init__(self, model: Layer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.model = model
        rope_index = getattr(model.language_model, "get_rope_index", None)
        parameters = () if rope_index is None else inspect.signature(rope_index).parameters
        self.has_positions = set(GRIDS) <= set(parameters)

    def __call__(
        self, token_ids: mx.array, cache: list[Cache] | None = None, **features: mx.array
    ) -> mx.array:
        """Compute logits [rows, n, vocabulary] of token ids int32 [rows, n].

        ``features`` is what the language model takes besides: ``inputs_embeds`` [rows, n, dim], ``position_ids``
        [3, rows, n] and others of the family's.
        """
        if self.has_positions and "position_ids" not in features:
            features["position_ids"] = _own_positions(token_ids, cache)
        output = self.model.language_model(token_ids, cache=cache, **features)
        logits: mx.array = output.logits
        return logits

    @property
    def language_model(self) -> Layer:
        """The part that turns embeddings into logits."""
        return self.model.language_model

    @property
    def layers(self) -> list[Layer]:
        """Layers of the language model."""
        layers: list[Layer] = self.model.language_model.layers
        return layers

    def make_cache(self) -> list[Cache]:
        """Make empty caches of one row, of mlx-lm's classes where mlx-vlm's do the same."""
        from mlx_vlm.models.cache import make_prompt_cache  # noqa: PLC0415 - a part of the extra

        _complete_state_caches()
        return [_as_mlx_lm(cache) for cache in make_prompt_cache(self.model.language_model)]


def _own_positions(token_ids: mx.array, cache: list[Cache] | None) -> mx.array:
    """Return positions int32 [3, rows, n] of rows without images: those of their caches."""
    rows, tokens = token_ids.shape
    offset: Any = 0 if not cache else getattr(cache[0], "offset", 0)
    starts = mx.array(offset, dtype=mx.int32).reshape(-1, 1)
    positions = starts + mx.arange(tokens, dtype=mx.int32)
    return mx.broadcast_to(positions, (3, rows, tokens))


def _as_mlx_lm(cache: Cache) -> Cache:
    """Return an empty cache of mlx-lm's class of the same name; others stay, and batch with none."""
    from mlx_lm.models import cache as mlx_lm_caches  # noqa: PLC0415 - after import_mlx_lm()
    from mlx_vlm.models import cache as mlx_vlm_caches  # noqa: PLC0415 - a part of the extra

    name = type(cache).__name__
    if name not in _CLASSES or type(cache) is not getattr(mlx_vlm_caches, name):
        return cache
    kind = getattr(mlx_lm_caches, name)
    if name == "CacheList":
        return kind(*(_as_mlx_lm(one) for one in cache.caches))
    if name == "RotatingKVCache":
        return kind(max_size=cache.max_size, keep=cache.keep)
    if name == "ArraysCache":
        return kind(len(cache.cache))
    if name == "ChunkedKVCache":
        return kind(cache.chunk_size)
    return kind()


def _complete_state_caches() -> None:
    """Give mlx-lm's caches of states the two methods by which mlx-vlm's layers write states (qwen3_5).

    mlx-vlm's own class is a copy of mlx-lm's with these and with what speculation needs, which machd does by itself.
    """
    from mlx_lm.models.cache import ArraysCache  # noqa: PLC0415 - after import_mlx_lm()

    if not hasattr(ArraysCache, "update_window"):
        ArraysCache.update_window = _update_window
        ArraysCache.update_recurrent = _update_recurrent


def _update_window(
    cache: Cache, index: int, source: mx.array, width: int, *, lengths: mx.array | None = None
) -> mx.array:
    """Keep the last ``width`` inputs of a convolution, of ``lengths`` new tokens of each row.

    ``source`` is the state before and the new inputs, [rows, width + tokens, dim].
    """
    tokens = source.shape[1] - width
    if lengths is None:
        window = mx.contiguous(source[:, tokens:])
    else:
        at = mx.clip(lengths, 0, tokens)[:, None] + mx.arange(width)  # [rows, width]
        window = mx.take_along_axis(source, at[..., None], axis=1)
    cache[index] = window
    return window


def _update_recurrent(
    cache: Cache,
    index: int,
    length: int,  # noqa: ARG001 - mlx-vlm's signature
    update: Callable[[mx.array | None, None], tuple[mx.array, ...]],
) -> tuple[mx.array, mx.array]:
    """Compute a recurrent state's next value, and keep it; returns the layer's output and the new state."""
    output, state = update(cache[index], None)[:2]
    cache[index] = state
    return output, state
