"""Keys and values as their norm and, after a random rotation, a few bits for each coordinate.

The method is TurboQuant (A. Zandieh, M. Daliri, M. Hadian, V. Mirrokni: "TurboQuant: Online Vector
Quantization with Near-optimal Distortion Rate", arXiv 2504.19874), the variant for the least mean
squared error: after a random rotation, the coordinates of any unit vector are distributed like those of
a random unit vector, nearly independently. So each is rounded by itself to the best codebook for that
distribution, which is known beforehand. Nothing is learnt from data.

Rotation and codebook depend on the width of a vector alone and are the same in every process, so one
process can read what another wrote to disk.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from machd.engine.kv.kv_format import VectorFormat

_SEED = b"machd turboquant 1"
_BITS = 4
_PER_WORD = 32 // _BITS
_LEAST_NORM = 1e-20

_GRID = 1 << 16
_ROUNDS = 2000
_SETTLED = 1e-7

_Floats = NDArray[np.float64]


class TurboQuantFormat(VectorFormat):
    """``turboquant``.

    Words are the codes, lowest first, uint32 [rows, heads, tokens, words]; the parameter is the norm,
    [rows, heads, tokens, 1] in the vectors' dtype.
    """

    name = "turboquant"
    parameter_count = 1

    def split_queries(self, queries: mx.array) -> tuple[mx.array, ...]:
        """Rotate queries as keys are rotated."""
        return (queries @ _tables(queries.shape[-1]).rotation.T,)

    def join_outputs(self, parts: Sequence[mx.array]) -> mx.array:
        """Rotate back."""
        return parts[0] @ _tables(parts[0].shape[-1]).rotation

    def _encoded(self, vectors: mx.array) -> tuple[mx.array, mx.array]:
        width = vectors.shape[-1]
        if not width:
            return vectors.astype(mx.uint32), vectors
        tables = _tables(width)
        exact = vectors.astype(mx.float32)
        norms = mx.linalg.norm(exact, axis=-1, keepdims=True)
        units = (exact / mx.maximum(norms, _LEAST_NORM)) @ tables.rotation.T
        codes = mx.zeros(units.shape, mx.uint8)
        for border in tables.borders:
            codes = codes + (units > border)
        return _packed(codes.astype(mx.uint32)), norms.astype(vectors.dtype)

    def _decoded(
        self, words: mx.array, parameters: mx.array, width: int, dtype: mx.Dtype
    ) -> mx.array:
        if not width:
            return parameters
        units = _levels(words, width) @ _tables(width).rotation
        return (units * parameters.astype(mx.float32)).astype(dtype)

    def _fills_words(self, width: int) -> bool:
        return width % _PER_WORD == 0

    def _parts(self, words: mx.array) -> tuple[mx.array, ...]:
        return (_levels(words, words.shape[-1] * _PER_WORD),)


def _packed(codes: mx.array) -> mx.array:
    missing = -codes.shape[-1] % _PER_WORD
    if missing:
        codes = mx.pad(codes, [(0, 0)] * 3 + [(0, missing)])
    grouped = codes.reshape(*codes.shape[:-1], -1, _PER_WORD)  # [..., words, codes]
    shifts = mx.arange(_PER_WORD, dtype=mx.uint32) * _BITS
    return (grouped << shifts).sum(axis=-1).astype(mx.uint32)


def _levels(words: mx.array, width: int) -> mx.array:
    """Coordinates of rotated unit vectors, float32 [..., width]."""
    # Four codes at a time: the cost is one of lookups, not of what they return.
    levels = _tables(width).by_half_word[words.view(mx.uint16)]
    return levels.reshape(*words.shape[:-1], -1)[..., :width]


@dataclass(frozen=True, slots=True)
class _Tables:
    """Rotation and codebook of a width.

    Attributes:
        rotation: float32 [width, width], orthogonal.
        borders: Between neighbouring levels, ascending.
        by_half_word: float32 [65536, 4], the levels of the four codes in 16 bits.
    """

    rotation: mx.array
    borders: tuple[float, ...]
    by_half_word: mx.array


@cache
def _tables(width: int) -> _Tables:
    levels = codebook(width)
    codes = np.arange(1 << 16)[:, None] >> np.array([0, 4, 8, 12]) & 15
    return _Tables(
        mx.array(rotation(width).astype(np.float32)),
        tuple(float(border) for border in (levels[1:] + levels[:-1]) / 2),
        mx.array(levels[codes].astype(np.float32)),
    )


def rotation(width: int) -> _Floats:
    """Make a random orthogonal matrix [width, width], the same in every process.

    Its random numbers come from a hash, not from a generator that a library might change. The QR factors
    with a positive diagonal are unique, so the rotation is, up to rounding.
    """
    count = width * width
    digest = hashlib.shake_256(_SEED + width.to_bytes(4, "little")).digest(16 * count)
    # Odd multiples of 2^-54, so that none is 0: two of them make a normal number (Box and Muller).
    uniform = ((np.frombuffer(digest, dtype="<u8") >> 11) + 0.5) * 2.0**-53
    normal = np.sqrt(-2 * np.log(uniform[:count])) * np.cos(2 * np.pi * uniform[count:])
    orthogonal, triangular = np.linalg.qr(normal.reshape(width, width))
    turned: _Floats = orthogonal * np.sign(np.diagonal(triangular))
    return turned


@cache
def codebook(width: int) -> _Floats:
    """Compute the levels [16], ascending, to which a coordinate of a unit vector is rounded.

    They are those of Lloyd and Max: each level is the mean of the coordinates nearest to it.
    A coordinate ``x`` in ``width`` dimensions has a density like ``(1 - x^2) ^ ((width - 3) / 2)``.
    """
    # Beyond ten standard deviations there is nothing; in very few dimensions the grid is all of it.
    reach = min(1.0, 10 / np.sqrt(width))
    edges = np.linspace(-reach, reach, _GRID + 1)
    grid = (edges[1:] + edges[:-1]) / 2
    density = np.exp((max(width, 3) - 3) / 2 * np.log1p(-(grid**2)))
    mass = np.concatenate([[0.0], np.cumsum(density)])
    moment = np.concatenate([[0.0], np.cumsum(density * grid)])
    # Begin with quantiles: every level is nearest to something.
    count = 1 << _BITS
    levels = np.interp((np.arange(count) + 0.5) / count, mass / mass[-1], edges)
    for _ in range(_ROUNDS):
        borders = np.concatenate([[-reach], (levels[1:] + levels[:-1]) / 2, [reach]])
        held = np.diff(np.interp(borders, edges, mass))
        better = np.diff(np.interp(borders, edges, moment)) / np.maximum(held, _LEAST_NORM)
        is_settled = np.max(np.abs(better - levels)) < _SETTLED * reach
        levels = better
        if is_settled:
            break
    # The density is symmetric, and so are the levels but for rounding, which this removes.
    settled: _Floats = (levels - levels[::-1]) / 2
    return settled
