"""The noise of draws: its distribution, its independence, and what it depends on."""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from machd.engine.sampling.gumbel_noise import draw_key, gumbel_noise

_DRAWS = 256
_TOKENS = 4096


def _noise(draws: list[tuple[int, int]], tokens: int = _TOKENS) -> npt.NDArray[np.float64]:
    return np.array(gumbel_noise(draws, tokens)).astype(np.float64)


def _uniform(draws: list[tuple[int, int]]) -> npt.NDArray[np.float64]:
    """The numbers in (0, 1) that the noise was made from."""
    return np.exp(-np.exp(-_noise(draws)))


_AXES = {
    "seeds": [(seed, 7) for seed in range(_DRAWS)],
    "positions": [(42, position) for position in range(_DRAWS)],
}


@given(seed=st.integers(-(2**63), 2**63 - 1), position=st.integers(0, 2**40))
def test_key_is_two_words_of_32_bits(seed: int, position: int) -> None:
    """Any seed and position have a key, the same each time."""
    key = draw_key(seed, position)
    assert all(0 <= half < 2**32 for half in key)
    assert key == draw_key(seed, position)


@pytest.mark.parametrize("draws", _AXES.values(), ids=_AXES)
def test_noise_has_the_gumbel_distribution(draws: list[tuple[int, int]]) -> None:
    """Over a million values each of 64 parts of (0, 1) has its share (chi-square)."""
    counts, _ = np.histogram(_uniform(draws), bins=64, range=(0, 1))
    expected = _DRAWS * _TOKENS / 64
    statistic = float(((counts - expected) ** 2 / expected).sum())
    assert statistic < 63 + 6 * math.sqrt(2 * 63)


@pytest.mark.parametrize("draws", _AXES.values(), ids=_AXES)
def test_noise_of_neighbours_is_independent(draws: list[tuple[int, int]]) -> None:
    """Neither the next token nor the next key, nor the next token under the next key, tells anything."""
    values = _uniform(draws) - 0.5
    pairs = [
        (values[:, 1:], values[:, :-1]),
        (values[1:], values[:-1]),
        (values[1:, 1:], values[:-1, :-1]),
        (values[1:, :-1], values[:-1, 1:]),
    ]
    for one, other in pairs:
        correlation = float((one * other).mean() * 12)
        assert abs(correlation) < 6 / math.sqrt(one.size)


def test_upper_tail_is_as_long_as_it_should_be() -> None:
    """Of 16 million values as many exceed 14 as the distribution says, and all are finite."""
    above, expected = 0, 0.0
    for start in range(4):
        noise = gumbel_noise([(seed, start) for seed in range(64)], 65536)
        above += int(np.array(noise > 14).sum())
        expected += noise.size * -math.expm1(-math.exp(-14))
        assert bool(mx.all(mx.isfinite(noise)).item())
    assert abs(above - expected) < 6 * math.sqrt(expected)


def test_noise_of_a_key_never_changes() -> None:
    """A seeded answer outlives an upgrade and another device: the noise of a key is what it was."""
    noise = gumbel_noise([(42, 3), (-1, 2**40)], 4)
    expected = [
        [0.4456971280, 0.9971369320, 0.8763731711, 0.6654662233],
        [-1.1285812419, 1.2917256364, -0.4421178336, 1.6059482998],
    ]
    assert np.array(noise) == pytest.approx(np.array(expected), abs=1e-6)
