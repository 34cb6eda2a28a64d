"""Numbers of one dtype to another, on the threads that read, which must not use mlx."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]
"""Bytes in one dimension."""

_SAME: dict[mx.Dtype, type[np.float32 | np.float16]] = {
    mx.float32: np.float32,
    mx.float16: np.float16,
}
_HALF_OF_LAST_BIT = 0x7FFF
"""What is added before bfloat16 cuts 16 bits off, and one more where the last bit that stays is set:
rounding to nearest, ties to even, as mlx rounds."""


def convert(stored: Bytes, stored_dtype: mx.Dtype, into: Bytes, dtype: mx.Dtype) -> None:
    """Convert floating-point numbers.

    Args:
        stored: Numbers of ``stored_dtype``: float32, float16 or bfloat16.
        stored_dtype: Of what is stored.
        into: Overwritten with as many numbers of ``dtype``, one of the same three.
        dtype: Another one.
    """
    if stored_dtype == mx.bfloat16 and dtype == mx.float32:
        _widen(stored.view(np.uint16), into.view(np.uint32))
        return
    if stored_dtype == mx.bfloat16:
        wide = np.empty(stored.size // 2, dtype=np.uint32)
        _widen(stored.view(np.uint16), wide)
        numbers = wide.view(np.float32)
    else:
        numbers = stored.view(_SAME[stored_dtype])
    if dtype == mx.bfloat16:
        bits = numbers.astype(np.float32).view(np.uint32)
        into.view(np.uint16)[:] = (bits + _HALF_OF_LAST_BIT + ((bits >> 16) & 1)) >> 16
    else:
        with np.errstate(over="ignore"):  # to infinity, as mlx
            into.view(_SAME[dtype])[:] = numbers


def _widen(
    narrow: np.ndarray[tuple[int], np.dtype[np.uint16]],
    wide: np.ndarray[tuple[int], np.dtype[np.uint32]],
) -> None:
    wide[:] = narrow
    np.left_shift(wide, 16, out=wide)
