"""Conversion between floating-point dtypes without mlx, for the threads that read experts."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]
"""uint8 [n]."""

_NUMPY_DTYPES: dict[mx.Dtype, type[np.float32 | np.float16]] = {
    mx.float32: np.float32,
    mx.float16: np.float16,
}
_BELOW_HALF = 0x7FFF
"""Added before bfloat16 drops 16 bits, plus 1 if the last kept bit is set: round to nearest, ties to even,
as mlx rounds."""


def convert(stored: Bytes, stored_dtype: mx.Dtype, into: Bytes, dtype: mx.Dtype) -> None:
    """Convert float32, float16 or bfloat16 to another of the three, with the same result as mlx's ``astype``."""
    if stored_dtype == mx.bfloat16 and dtype == mx.float32:
        _widen(stored.view(np.uint16), into.view(np.uint32))
        return
    if stored_dtype == mx.bfloat16:
        wide = np.empty(stored.size // 2, dtype=np.uint32)
        _widen(stored.view(np.uint16), wide)
        values = wide.view(np.float32)
    else:
        values = stored.view(_NUMPY_DTYPES[stored_dtype])
    if dtype == mx.bfloat16:
        bits = values.astype(np.float32).view(np.uint32)
        into.view(np.uint16)[:] = (bits + _BELOW_HALF + ((bits >> 16) & 1)) >> 16
    else:
        with np.errstate(over="ignore"):  # to infinity, as mlx
            into.view(_NUMPY_DTYPES[dtype])[:] = values


def _widen(
    narrow: np.ndarray[tuple[int], np.dtype[np.uint16]],
    wide: np.ndarray[tuple[int], np.dtype[np.uint32]],
) -> None:
    """Convert bfloat16 bits to float32 bits."""
    wide[:] = narrow
    np.left_shift(wide, 16, out=wide)
