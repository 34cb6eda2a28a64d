"""The program of a child process that checks the products of one BLAS library.

It runs without machd's packages (``python -I -S FILE LIBRARY NUMPY_FOLDER``), so that it starts in some
30 ms, and prints one JSON value. The library's threads and faults end with it.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_ROW_MAJOR, _NOT_TRANSPOSED, _TRANSPOSED = 101, 111, 112  # cblas.h

_LARGEST = 4
"""Of the numbers that are multiplied. A sum of 2^18 products of whole numbers up to 4 stays below 2^24, so
float32 holds it exactly in whatever order it is taken: a difference is no rounding."""

_SLACK = 5
"""Columns by which each matrix is wider than it is used: rows of a slab and of a fused product lie so."""

_WIDTH, _COLUMNS = 576, 1536
"""Of the weight matrix: that of the embedded model's MLP. Each product takes a second at most, with any BLAS."""

_WEIGHT_ROWS = (1, 2, 3, 4, 5, 8, 16, 17, 33, 64, 200)
_HEAD_WIDTHS = (64, 128)
_POSITIONS = (1, 17, 256, 300)
_QUERY_ROWS = (1, 3, 9, 64)


class Product(NamedTuple):
    """One call of ``cblas_sgemm``: [rows, width] times [width, columns], which may be stored as [columns, width].

    The result may be added to what is there, as a bias is.
    """

    rows: int
    columns: int
    width: int
    is_transposed: bool = True
    is_added: bool = False

    def __str__(self) -> str:
        right = f"[{self.columns}, {self.width}]" if self.is_transposed else ""
        right = right or f"[{self.width}, {self.columns}]"
        return f"[{self.rows}, {self.width}] times {right}{' transposed' * self.is_transposed}"


def model_products() -> Iterator[Product]:
    """Yield products as a step and a prompt have them: weights in both directions, scores, values."""
    for rows in _WEIGHT_ROWS:
        yield Product(rows, _COLUMNS, _WIDTH)
        yield Product(rows, _WIDTH, _COLUMNS, is_added=True)
    for head_width in _HEAD_WIDTHS:
        for positions in _POSITIONS:
            for rows in _QUERY_ROWS:
                yield Product(rows, positions, head_width)
                yield Product(rows, head_width, positions, is_transposed=False)


def wrong_product(library: str) -> str | None:
    """Return what is wrong with the first wrong product; None if all are right.

    The result is compared after it was multiplied with a vector of numbers that are not zero: then
    the plain sums take one pass over the matrices, and one wrong number anywhere shows.

    Raises:
        OSError: The library cannot be loaded.
        AttributeError: It has no ``cblas_sgemm``.
    """
    import numpy as np  # noqa: PLC0415 - its folder is known only now

    multiply = _sgemm(library)
    random = np.random.default_rng(0)
    matrices: dict[tuple[int, int], NDArray[np.float32]] = {}

    def matrix(rows: int, width: int) -> NDArray[np.float32]:
        if (rows, width) not in matrices:
            shape = (rows, width + _SLACK)
            matrices[rows, width] = random.integers(-_LARGEST, _LARGEST, shape).astype(np.float32)
        return matrices[rows, width]

    for product in model_products():
        left = matrix(product.rows, product.width)
        stored = (product.columns, product.width)
        right = matrix(*(stored if product.is_transposed else stored[::-1]))
        result = np.full((product.rows, product.columns + _SLACK), np.nan, np.float32)
        if product.is_added:
            result[:, : product.columns] = 1.0
        _multiply(multiply, product, left, right, result)
        if not np.isnan(result[:, product.columns :]).all():
            return f"{product} wrote beyond its result"
        weights = random.integers(1, _LARGEST, product.columns).astype(np.float64)
        columns_sum = _weighed(right, product, weights)
        expected = np.einsum("rw,w->r", left[:, : product.width], columns_sum, dtype=np.float64)
        expected += weights.sum() * product.is_added
        found = np.einsum("rc,c->r", result[:, : product.columns], weights, dtype=np.float64)
        if not np.array_equal(found, expected):
            wrong = int(np.argmax(found != expected))
            return f"{product} is wrong in row {wrong}"
    return None


def _weighed(
    right: NDArray[np.float32], product: Product, weights: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the sum of the right matrix's columns, each times its weight: [width]."""
    import numpy as np  # noqa: PLC0415 - its folder is known only now

    if product.is_transposed:
        used, subscripts = right[:, : product.width], "cw,c->w"
    else:
        used, subscripts = right[:, : product.columns], "wc,c->w"
    summed: NDArray[np.float64] = np.einsum(subscripts, used, weights, dtype=np.float64)
    return summed


def _multiply(
    multiply: Callable[..., None],
    product: Product,
    left: NDArray[np.float32],
    right: NDArray[np.float32],
    result: NDArray[np.float32],
) -> None:
    transposition = _TRANSPOSED if product.is_transposed else _NOT_TRANSPOSED
    multiply(
        *(_ROW_MAJOR, _NOT_TRANSPOSED, transposition, product.rows, product.columns, product.width),
        *(1.0, left.ctypes.data, left.shape[1], right.ctypes.data, right.shape[1]),
        *(float(product.is_added), result.ctypes.data, result.shape[1]),
    )


def _sgemm(library: str) -> Callable[..., None]:
    multiply = ctypes.CDLL(library).cblas_sgemm
    multiply.restype = None
    multiply.argtypes = [
        *[ctypes.c_int] * 6,  # order, transpositions, rows, columns, width
        *(ctypes.c_float, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_int),
        *(ctypes.c_float, ctypes.c_void_p, ctypes.c_int),
    ]
    return multiply


def main() -> None:
    """Check the library that the arguments name, and end without its own clean-up."""
    library, numpy_folder = sys.argv[1:]
    sys.path.append(numpy_folder)
    sys.stdout.write(json.dumps(wrong_product(library)))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
