"""machd's own operations on rows: normalisation, activation and rotation."""

from __future__ import annotations

import math
from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest

native = pytest.importorskip("machd_native", reason="make setup has found no compiler")

_ROUNDING = 2e-6


def _numbers(*shape: int, seed: int = 0) -> mx.array:
    return mx.array(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


def _table(positions: int, half: int) -> tuple[mx.array, mx.array]:
    angles = mx.arange(positions)[:, None] * mx.exp(-mx.arange(half) / half * 9)
    return mx.cos(angles), mx.sin(angles)


@pytest.mark.parametrize("size", [1, 7, 16, 50, 576, 4096])
@pytest.mark.parametrize("rows", [1, 5, 300])
def test_operations_are_those_of_plain_loops(
    instruction_sets: list[str], rows: int, size: int
) -> None:
    """Norms and activations of rows of any length; a row's bits are the same alone, and on each instruction set."""
    x, weight = _numbers(rows, 2 * size) * 4, _numbers(2 * size, seed=1)
    for operation in (
        lambda x: native.rms_norm(x, weight, 1e-5),
        lambda x: native.layer_norm(x, weight, weight * 0.3, 1e-5),
        native.gelu,
        native.silu_product,
    ):
        native.use_instruction_set("plain")
        expected = np.array(operation(x))
        results = []
        for name in instruction_sets:
            native.use_instruction_set(name)
            got = np.array(operation(x))
            assert np.abs(got - expected).max() <= _ROUNDING * max(1, np.abs(expected).max()), name
            alone = [np.array(operation(x[at : at + 1])) for at in range(0, rows, 77)]
            assert np.array_equal(np.concatenate(alone), got[::77])
            results.append(got)
        assert all(np.array_equal(one, results[0]) for one in results)


def test_norm_and_activation_are_mlx_s() -> None:
    """Results agree within rounding; NaN stays NaN, and large numbers do not overflow."""
    x, weight = _numbers(3, 4, 64), _numbers(64, seed=1)
    assert mx.allclose(
        native.rms_norm(x, weight, 1e-5), mx.fast.rms_norm(x, weight, 1e-5), atol=1e-6, rtol=1e-5
    )
    gate, up = x[..., :32], x[..., 32:]
    assert mx.allclose(native.silu_product(x), gate * mx.sigmoid(gate) * up, atol=1e-6, rtol=1e-5)
    odd = mx.array([[float("nan"), 200.0, -200.0, 0.0, 1.0, 1.0, 1.0, float("nan")]])
    result = native.silu_product(odd)[0]
    assert mx.isnan(result[0])
    assert result[1] == 200
    assert abs(float(result[2])) < 1e-30
    assert mx.isnan(result[3])


def test_layer_norm_is_mlx_s() -> None:
    """Results agree within rounding, of rows far from zero, too; one that holds NaN is all NaN, and no other."""
    x, weight, bias = _numbers(3, 4, 50) + 30, _numbers(50, seed=1), _numbers(50, seed=2)
    got = native.layer_norm(x, weight, bias, 1e-5)
    assert mx.allclose(got, mx.fast.layer_norm(x, weight, bias, 1e-5), atol=3e-5, rtol=1e-5)
    x[1, 2, 49] = mx.nan
    broken = mx.isnan(native.layer_norm(x, weight, bias, 1e-5)).all(axis=-1)
    assert broken.tolist() == [[False] * 4, [False, False, True, False], [False] * 4]


def test_gelu_is_that_of_the_error_function() -> None:
    """Each number is that of float64 within 6e-7 of its size, and 1e-8 where it is next to zero; NaN stays NaN."""
    x = np.concatenate([np.linspace(-12, 12, 40_001), np.geomspace(1e-30, 1e30, 999)])
    x = np.concatenate([x, -x]).astype(np.float32)
    expected = [one * 0.5 * math.erfc(-one / math.sqrt(2)) for one in x.astype(float)]
    error = np.abs(np.array(native.gelu(mx.array(x))) - expected)
    allowed = np.where(x > 0, 6e-7, 4e-6) * np.abs(expected) + np.where(np.abs(x) > 5, 1e-8, 0)
    assert (error <= allowed + 1e-36).all()
    odd = native.gelu(mx.array([mx.nan, mx.inf, -mx.inf, 0.0]))
    assert mx.isnan(odd[0])
    assert odd[1] == mx.inf
    assert mx.abs(odd[2:]).max() < 1e-35


@pytest.mark.parametrize("head_dim", [2, 64, 80])
@pytest.mark.parametrize("tokens", [1, 9])
def test_heads_are_turned_by_their_positions(
    instruction_sets: list[str], tokens: int, head_dim: int
) -> None:
    """As mlx's rotation of halves; the last heads stay, and a token is turned alike alone and in a prompt."""
    x, positions = _numbers(2, tokens, 5, head_dim), mx.array([3, 40], dtype=mx.int32)
    cosines, sines = _table(64, head_dim // 2)
    at = positions[:, None] + mx.arange(tokens)
    cosine, sine = cosines[at][:, :, None], sines[at][:, :, None]
    first, second = x[:, :, :3, : head_dim // 2], x[:, :, :3, head_dim // 2 :]
    expected = mx.concatenate(
        [first * cosine - second * sine, first * sine + second * cosine], axis=-1
    )
    results = []
    for name in ("plain", *instruction_sets):
        native.use_instruction_set(name)
        got = native.rotate(x, cosines, sines, positions, rotated=3)
        assert mx.allclose(got[:, :, :3], expected, atol=1e-6)
        assert mx.array_equal(got[:, :, 3:], x[:, :, 3:])
        last = native.rotate(x[:, -1:], cosines, sines, positions + (tokens - 1), rotated=3)
        assert mx.array_equal(last, got[:, -1:])
        results.append(got)
    assert all(mx.array_equal(one, results[1]) for one in results[1:])


def test_positions_beyond_a_table_are_its_last() -> None:
    """Nothing outside it is read."""
    x, (cosines, sines) = _numbers(2, 1, 1, 8), _table(4, 4)
    wild = native.rotate(x, cosines, sines, mx.array([1000, -7], dtype=mx.int32), rotated=1)
    assert mx.array_equal(
        wild, native.rotate(x, cosines, sines, mx.array([3, 0], dtype=mx.int32), rotated=1)
    )


def test_sizes_that_do_not_go_together_are_refused() -> None:
    """Before anything is computed."""
    x, (cosines, sines) = _numbers(2, 1, 3, 8), _table(4, 4)
    at = mx.array([0, 0], dtype=mx.int32)
    wrongs: list[Callable[[], object]] = [
        lambda: native.rms_norm(x, _numbers(7), 1e-5),
        lambda: native.rms_norm(x.astype(mx.float16), _numbers(8), 1e-5),
        lambda: native.layer_norm(x, _numbers(7), _numbers(7), 1e-5),
        lambda: native.layer_norm(x, _numbers(8), _numbers(7), 1e-5),
        lambda: native.gelu(x.astype(mx.float16)),
        lambda: native.silu_product(x[..., :7]),
        lambda: native.rotate(x, cosines[:, :3], sines[:, :3], at, rotated=3),
        lambda: native.rotate(x, cosines, sines[:2], at, rotated=3),
        lambda: native.rotate(x, cosines, sines, at[:1], rotated=3),
        lambda: native.rotate(x, cosines, sines, at.astype(mx.float32), rotated=3),
        lambda: native.rotate(x, cosines, sines, at, rotated=4),
    ]
    for wrong in wrongs:
        with pytest.raises(ValueError, match=r"are|have|has|hold"):
            wrong()
