"""The error of 8-bit keys and values counts beyond what their dtype rounds anyway."""

from __future__ import annotations

import mlx.core as mx
import pytest

from machd.engine.kv.formats import kv_format_named
from machd.engine.kv.kv_format import KvWidths
from machd_probes.checks import quantized_kv

_DTYPES = pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)


def _numbers(dtype: mx.Dtype, offset: float = 0.0) -> mx.array:
    return (mx.random.normal((1, 2, 40, 64), key=mx.random.key(3)) + offset).astype(dtype)


@_DTYPES
@pytest.mark.parametrize("offset", [0.0, 2.0, -5.0])
def test_a_dtypes_rounding_is_no_error(dtype: mx.Dtype, offset: float) -> None:
    """Eight bits pass in every dtype, also where the numbers lie far from zero."""
    exact = _numbers(dtype, offset)
    kv_format = kv_format_named("affine8")
    near, _ = kv_format.decode(kv_format.encode(exact, exact), KvWidths.of(exact, exact))
    assert quantized_kv._error(exact, near) < quantized_kv._MAX_ERROR


@_DTYPES
def test_a_number_that_is_off_by_steps_is_one(dtype: mx.Dtype) -> None:
    """Six steps of eight bits are more than any dtype rounds."""
    exact = _numbers(dtype)
    span = float((exact.max(axis=-1) - exact.min(axis=-1)).max())
    near = exact.astype(mx.float32) + (mx.arange(64) == 9) * (6 / 255 * span)
    assert quantized_kv._error(exact, near.astype(dtype)) > quantized_kv._MAX_ERROR
