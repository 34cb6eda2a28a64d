"""Pooling: one vector of all token vectors of a text, in float32.

Rows are padded at the right, so a row's last token is the one before its length, and padding has no weight.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import mlx.core as mx


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


def normalise(vectors: mx.array) -> mx.array:
    """Scale each row to length 1; one of zeros stays so."""
    return vectors / mx.maximum(mx.linalg.norm(vectors, axis=-1, keepdims=True), 1e-12)
