"""Powers of two from vectorised operations are exact to float32 rounding."""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np
import pytest
from support.engines.cpu_layers import for_cpu_layers

from machd.engine.kernels.exponential import MIN_EXPONENT, exp2, silu_product

pytestmark = for_cpu_layers


def test_exp2_is_exact_to_two_float_steps() -> None:
    """The error stays under two float32 steps over the whole range, halves included."""
    exponents = np.concatenate(
        [np.linspace(MIN_EXPONENT, 126, 1_000_001), np.arange(-252, 253) / 2]
    ).astype(np.float32)
    powers = np.array(exp2(mx.array(exponents)), dtype=np.float64)
    right = 2.0 ** exponents.astype(np.float64)
    errors = np.abs(powers / right - 1)
    assert errors.max() < 2e-7
    assert not errors[exponents == np.round(exponents)].any(), "whole powers are exact"


def test_exp2_keeps_nan() -> None:
    """A NaN stays NaN, so that a faulty row is detected."""
    assert mx.isnan(exp2(mx.array([math.nan]))).all()
    assert mx.isnan(silu_product(mx.full((16_384,), math.nan), mx.ones((16_384,)))).all()


@pytest.mark.parametrize("size", [64, 16_384, 100_000])
def test_silu_product_agrees_with_mlx(size: int) -> None:
    """Few numbers and many, from where a sigmoid is 0 to where it is 1."""
    gate = mx.linspace(-200, 200, size)
    up = mx.linspace(-3, 3, size)
    right = gate * mx.sigmoid(gate) * up
    assert mx.allclose(silu_product(gate, up), right, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_silu_product_keeps_other_dtypes(dtype: mx.Dtype) -> None:
    """Other dtypes than float32 go through MLX's sigmoid, as the polynomial builds float32 bits."""
    gate = mx.linspace(-4, 4, 10_000).astype(dtype)
    product = silu_product(gate, gate)
    assert product.dtype == dtype
    assert mx.allclose(product, gate * mx.sigmoid(gate) * gate)
