"""Pooling of texts that lie behind one another: what padded texts give, and nothing of a neighbour's."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from support.engines.cpu_layers import for_cpu_layers

from machd.engine.backend.native_kernels import native_kernels
from machd.engine.encoding.pooling import first_tokens, pool, pool_packed

pytestmark = [
    for_cpu_layers,
    pytest.mark.skipif(native_kernels() is None, reason="make setup has found no compiler"),
]

_LENGTHS = [3, 1, 9, 4]
_MODES = ("cls", "last", "max", "mean", "mean_sqrt_len_tokens", "weightedmean")


def _texts() -> tuple[np.ndarray, mx.array]:
    """Return the same vectors behind one another and padded with NaN."""
    packed = np.random.default_rng(2).normal(size=(sum(_LENGTHS), 32)).astype(np.float32)
    padded = np.full((len(_LENGTHS), max(_LENGTHS), 32), np.nan, np.float32)
    for row, text in enumerate(np.split(packed, np.cumsum(_LENGTHS)[:-1])):
        padded[row, : len(text)] = text
    return packed, mx.array(padded)


@pytest.mark.parametrize("modes", [*((one,) for one in _MODES), ("mean", "max", "cls")], ids=str)
def test_packed_texts_are_pooled_as_padded_ones(modes: tuple[str, ...]) -> None:
    """In every mode, and in several that are joined."""
    packed, padded = _texts()
    expected = pool(padded, mx.array(_LENGTHS, mx.int32), modes)
    got = pool_packed(mx.array(packed), _LENGTHS, modes)
    assert mx.allclose(got, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("mode", _MODES)
def test_vector_of_a_text_has_nothing_of_its_neighbours(mode: str) -> None:
    """Other numbers before and behind a text change no bit of its vector."""
    packed, _ = _texts()
    whole = np.array(pool_packed(mx.array(packed), _LENGTHS, [mode]))
    packed[:4], packed[13:] = np.nan, np.inf
    changed = np.array(pool_packed(mx.array(packed), _LENGTHS, [mode]))
    assert np.array_equal(changed[2], whole[2])
    assert not np.isfinite(changed[[0, 1, 3]]).any()


def test_first_tokens_are_those_of_each_text() -> None:
    """A classifier's head takes them."""
    packed, padded = _texts()
    assert mx.array_equal(first_tokens(mx.array(packed), _LENGTHS), padded[:, 0])
