"""The product of queries with keys on the CPU, in the one of two forms that its BLAS computes faster.

A column for each query reads the keys once for each head that shares them, and is a fast case of AVX-512 libraries. One
product for all heads that share keys reads them once. In OpenBLAS 0.3.21 for AVX2 it takes 0.6 of the time with three heads a
key of 64 numbers and 0.3 with four of 128; for AVX-512 1.0 to 1.3 and 0.85 to 1.3; in MKL 0.85 to 1.05, in BLIS 1.4 to 1.9.
"""

from __future__ import annotations

import statistics
from enum import Enum, auto
from functools import cache

import mlx.core as mx

from machd.clock import Clock, SystemClock

_ROWS = 16
_KEY_BYTES = 12 << 20
"""More than a core's cache holds, as in a batch: what is near the core favours the product for all heads."""

_TRIALS = 5
_WORTHWHILE = 0.8
"""Share of the other's time that the product for all heads may take at most: noise does not decide."""


class ScoreProduct(Enum):
    """A way to compute the scores of one token a row."""

    COLUMNS = auto()
    """The keys by a column for each query."""
    HEADS = auto()
    """The queries of the heads that share keys by the keys, turned round."""

    def __call__(self, queries: mx.array, keys: mx.array) -> mx.array:
        """Multiply.

        Args:
            queries: [rows, kv_heads, repeats, head_dim].
            keys: [rows, kv_heads, width, head_dim].

        Returns:
            [rows, kv_heads, repeats, width].
        """
        if self is ScoreProduct.COLUMNS:
            return (keys[:, :, None] @ queries[..., None]).squeeze(-1)
        return queries @ keys.swapaxes(-1, -2)


@cache
def fastest_score_product(kv_heads: int, repeats: int, head_dim: int) -> ScoreProduct:
    """Measure both within about 20 ms, once a process: engines of one process add in one order.

    Args:
        kv_heads: Heads of keys.
        repeats: Heads of queries that share one of keys.
        head_dim: Numbers of a head.
    """
    return _measured(kv_heads, repeats, head_dim, SystemClock())


def _measured(kv_heads: int, repeats: int, head_dim: int, clock: Clock) -> ScoreProduct:
    width = max(1, _KEY_BYTES // (_ROWS * kv_heads * head_dim * mx.float32.size))
    queries = mx.ones((_ROWS, kv_heads, repeats, head_dim))
    keys = mx.ones((_ROWS, kv_heads, width, head_dim))
    mx.eval(queries, keys)
    times_s: dict[ScoreProduct, list[float]] = {one: [] for one in ScoreProduct}
    for trial in range(1 + _TRIALS):
        for product, its in times_s.items():
            started_s = clock.monotonic_s()
            mx.eval(product(queries, keys))
            if trial:  # the first one warms up
                its.append(clock.monotonic_s() - started_s)
    medians_s = {one: statistics.median(its) for one, its in times_s.items()}
    is_faster = medians_s[ScoreProduct.HEADS] <= _WORTHWHILE * medians_s[ScoreProduct.COLUMNS]
    return ScoreProduct.HEADS if is_faster else ScoreProduct.COLUMNS
