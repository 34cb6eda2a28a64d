"""The program of a child process that times one BLAS library: products of 1 row and of 16 rows.

It runs without machd's packages (``python -I -S FILE LIBRARY WIDTH COLUMNS LIMIT_S``), so that it
starts in some 30 ms, and prints one JSON object. The library's threads and faults end with it.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time

_ROWS = (1, 16)
_BUFFER_BYTES = 32 << 20
"""Memory that the products read in turn: more than a core's cache holds, as a model's weights are."""

_MIN_ROUNDS = 3
_FLOAT_BYTES = 4
_ONE = b"\x00\x00\x80\x3f"  # 1.0 in float32, little-endian
_ROW_MAJOR, _NOT_TRANSPOSED, _TRANSPOSED = 101, 111, 112  # cblas.h


def times_ms(library: str, width: int, columns: int, limit_s: float) -> list[float]:
    """Return the median time of a product of 1 row, then of 16 rows, in milliseconds.

    The best time would hide how long threads wait for each other on cores that are not free.

    The matrix is [columns, width] and multiplied transposed, as mlx multiplies by the weight of a
    linear layer. The row counts take turns, so that a machine whose speed drifts slows both.

    Raises:
        OSError: The library cannot be loaded.
        AttributeError: It has no ``cblas_sgemm``.
    """
    multiply = ctypes.CDLL(library).cblas_sgemm
    multiply.restype = None
    multiply.argtypes = [
        *[ctypes.c_int] * 6,  # order, transpositions, rows, columns, width
        *(ctypes.c_float, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_int),
        *(ctypes.c_float, ctypes.c_void_p, ctypes.c_int),
    ]
    matrix_bytes = width * columns * _FLOAT_BYTES
    matrices = max(1, _BUFFER_BYTES // matrix_bytes)
    weights = _filled(matrices * width * columns)
    rows_in = _filled(_ROWS[-1] * width)
    rows_out = _filled(_ROWS[-1] * columns)
    times_s: dict[int, list[float]] = {rows: [] for rows in _ROWS}
    end_s = time.perf_counter() + limit_s
    rounds = 0
    while rounds < _MIN_ROUNDS or time.perf_counter() < end_s:
        matrix = ctypes.addressof(weights) + rounds % matrices * matrix_bytes
        for rows in _ROWS:
            started_s = time.perf_counter()
            multiply(
                *(_ROW_MAJOR, _NOT_TRANSPOSED, _TRANSPOSED, rows, columns, width),
                *(1.0, ctypes.addressof(rows_in), width, matrix, width),
                *(0.0, ctypes.addressof(rows_out), columns),
            )
            times_s[rows].append(time.perf_counter() - started_s)
        rounds += 1
    return [sorted(times)[len(times) // 2] * 1000.0 for times in times_s.values()]


def _filled(count: int) -> ctypes.Array[ctypes.c_float]:
    """Return an array of ones."""
    return (ctypes.c_float * count).from_buffer(bytearray(_ONE) * count)


def main() -> None:
    """Time the library that the arguments name, and end without the library's own clean-up."""
    library, width, columns, limit_s = sys.argv[1:]
    sys.stdout.write(json.dumps(times_ms(library, int(width), int(columns), float(limit_s))))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
