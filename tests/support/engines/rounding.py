"""A check that two results of the same sums differ by rounding alone.

A BLAS adds the terms of a product in an order of its own for each shape, kernel and number of threads, so that the
same row computed beside other rows has other last bits. Exact bits may be asked only of the same call on the same
shapes.
"""

from __future__ import annotations

import mlx.core as mx

_ROUNDINGS = 512
"""Roundings of the largest value that are tolerated.

A sum of n terms in another order differs by up to n roundings of the largest partial sum. The tiny models add 16 to 64
terms a product, and a few products follow one another. Between shapes, kernels and libraries 12 roundings were
measured; an expert that is not the right one moves logits by eight million.
"""


def is_equal_but_for_rounding(found: mx.array, expected: mx.array) -> bool:
    """Return whether each value is that of ``expected``, give or take ``_ROUNDINGS`` of its type; NaN is not."""
    rounding = mx.finfo(expected.dtype).eps * mx.abs(expected).max()
    return bool(mx.all(mx.abs(found - expected) <= _ROUNDINGS * rounding).item())
