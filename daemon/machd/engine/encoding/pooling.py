"""Pooling: one vector of all token vectors of a text, in float32.

Rows are padded at the right, so a row's last token is the one before its length, and padding has no weight.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

import mlx.core as mx
import numpy as np

from machd.engine.kernels.native_bert import text_means


def pool(hidden: mx.array, lengths: mx.array, modes: Sequence[str]) -> mx.array:
    """Pool token vectors in each of several ways, and join the results.

    Args:
        hidden: [rows, tokens, width]; what stands behind a row's length has no effect, NaN included.
        lengths: Tokens of each row, at least 1: int32, [rows].
        modes: Those of :class:`machd.engine.encoding.sentence_modules.PoolingModule`.

    Returns:
        float32, [rows, len(modes) * width].
    """
    hidden = hidden.astype(mx.float32)
    is_token = (mx.arange(hidden.shape[1])[None, :] < lengths[:, None])[
        :, :, None
    ]  # [rows, tokens, 1]
    pooled = [_pool(hidden, is_token, lengths, mode) for mode in modes]
    return pooled[0] if len(pooled) == 1 else mx.concatenate(pooled, axis=-1)


def _pool(hidden: mx.array, is_token: mx.array, lengths: mx.array, mode: str) -> mx.array:
    rows = mx.arange(hidden.shape[0])
    if mode == "cls":
        return hidden[:, 0]
    if mode == "last":
        return hidden[rows, lengths - 1]
    if mode == "max":
        return mx.where(is_token, hidden, -mx.inf).max(axis=1)
    counts = lengths[:, None].astype(mx.float32)  # [rows, 1]
    if mode == "weightedmean":
        weights = mx.arange(1, hidden.shape[1] + 1, dtype=mx.float32)[None, :, None]
        total = mx.where(is_token, hidden * weights, 0).sum(axis=1)
        return total / (counts * (counts + 1) / 2)
    total = mx.where(is_token, hidden, 0).sum(axis=1)
    divisors: Mapping[str, mx.array] = {"mean": counts, "mean_sqrt_len_tokens": mx.sqrt(counts)}
    return total / divisors[mode]


def pool_packed(hidden: mx.array, lengths: Sequence[int], modes: Sequence[str]) -> mx.array:
    """Pool token vectors of texts that lie behind one another; see :func:`pool`.

    Args:
        hidden: float32, [tokens, width].
        lengths: Tokens of each text, at least 1.
        modes: Those of :func:`pool`.
    """
    return mx.concatenate([_pool_packed(hidden, lengths, mode) for mode in modes], axis=-1)


def _pool_packed(hidden: mx.array, lengths: Sequence[int], mode: str) -> mx.array:
    if mode == "mean":
        return text_means(hidden, lengths)
    if mode == "cls":
        return first_tokens(hidden, lengths)
    begins = _begins(lengths)
    if mode == "last":
        return hidden[mx.array(begins + np.array(lengths) - 1)]
    # Behind a text stand a neighbour's tokens, or the last one's again: padding has no weight.
    places = np.minimum(begins[:, None] + np.arange(max(lengths)), hidden.shape[0] - 1)
    return pool(hidden[mx.array(places)], mx.array([*lengths], mx.int32), [mode])


def first_tokens(hidden: mx.array, lengths: Sequence[int]) -> mx.array:
    """Return the vector of each text's first token, [texts, width] of [tokens, width]."""
    return hidden[mx.array(_begins(lengths))]


def _begins(lengths: Sequence[int]) -> np.ndarray:
    return np.array([0, *accumulate(lengths)][:-1])


def normalise(vectors: mx.array) -> mx.array:
    """Scale each row to length 1; one of zeros stays so."""
    return vectors / mx.maximum(mx.linalg.norm(vectors, axis=-1, keepdims=True), 1e-12)
