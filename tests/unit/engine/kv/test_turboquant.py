"""TurboQuant's figures are the paper's, and the same wherever they are computed."""

from __future__ import annotations

import hashlib

import mlx.core as mx
import numpy as np
import pytest

from machd.engine.kv.kv_format import KvWidths
from machd.engine.kv.turboquant import TurboQuantFormat, codebook, rotation

_PUBLISHED_MSE = 0.009497
"""Error of a unit vector: Max's figure for the normal distribution, which arXiv 2504.19874 rounds to 0.009."""

_MAX_LEVELS = (0.1284, 0.3881, 0.6568, 0.9424, 1.2562, 1.6181, 2.0690, 2.7326)
"""Lloyd's and Max's sixteen levels of the normal distribution, the upper half of them."""


@pytest.mark.parametrize("width", [64, 128, 256])
def test_the_error_is_the_published_one(width: int) -> None:
    """The error is the published one for vectors of any direction."""
    random = np.random.default_rng(0)
    normal = random.standard_normal((1, 1, 2000, width)).astype(np.float32)
    lopsided = normal * np.geomspace(1, 100, width, dtype=np.float32)
    axes = np.eye(width, dtype=np.float32)[None, None]
    kv_format = TurboQuantFormat()
    for vectors in map(mx.array, (normal, lopsided, axes)):
        arrays = kv_format.encode(vectors, vectors)
        near, _ = kv_format.decode(arrays, KvWidths.of(vectors, vectors))
        errors = mx.square(near - vectors).sum(axis=-1) / mx.square(vectors).sum(axis=-1)
        assert float(errors.mean()) == pytest.approx(_PUBLISHED_MSE, rel=0.06)


def test_in_many_dimensions_levels_are_those_of_the_normal_distribution() -> None:
    """A coordinate of a unit vector has a variance of one by the dimensions."""
    levels = codebook(4096) * np.sqrt(4096)

    assert levels[8:] == pytest.approx(_MAX_LEVELS, abs=3e-3)
    assert levels == pytest.approx(-levels[::-1])


@pytest.mark.parametrize("width", [1, 2, 3, 16, 64, 80, 128])
def test_a_rotation_keeps_lengths(width: int) -> None:
    """It is orthogonal, and not the identity."""
    matrix = rotation(width)

    assert np.allclose(matrix @ matrix.T, np.eye(width), atol=1e-12)
    assert width == 1 or not np.allclose(np.abs(matrix), np.eye(width), atol=0.1)


def test_the_rotation_is_the_same_everywhere() -> None:
    """Blocks on disk are read by other processes and later versions: it may never change."""
    rounded = np.round(rotation(64), 6) + 0.0
    digest = hashlib.sha256(rounded.astype("<f8").tobytes()).hexdigest()

    assert digest[:16] == "5475009c531a6644"


@pytest.mark.parametrize("width", [10, 64, 7])
def test_codes_fill_words(width: int) -> None:
    """A word holds eight codes, all of one vector."""
    vectors = mx.array(np.random.default_rng(1).standard_normal((1, 2, 3, width)))
    words = TurboQuantFormat().encode(vectors, vectors)[0]

    assert words.dtype == mx.uint32
    assert words.shape == (1, 4, 3, -(-width // 8))


def test_zero_vector_decodes_to_zeros() -> None:
    """A vector of zeros decodes to zeros."""
    nothing = mx.zeros((1, 1, 2, 64))
    kv_format = TurboQuantFormat()

    near, _ = kv_format.decode(kv_format.encode(nothing, nothing), KvWidths.of(nothing, nothing))

    assert not mx.any(near)
