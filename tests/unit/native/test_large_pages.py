"""Weights in large pages: the same numbers, held once."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import mlx.core as mx
import pytest

native = pytest.importorskip("machd_native", reason="make setup has found no compiler")

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere arrays stay as they are")


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.uint8, mx.uint32])
@pytest.mark.parametrize("shape", [(), (0, 3), (1,), (7, 5, 3), (1000, 3001)])
def test_numbers_are_the_same(dtype: mx.Dtype, shape: tuple[int, ...]) -> None:
    """Of every dtype and size, also of an array whose numbers lie apart; one that lies there already stays where it is."""
    array = (mx.random.uniform(shape=(*shape, 2)) * 100).astype(dtype)
    for view in (array, array[..., 0], array.swapaxes(0, -1)):
        laid = native.in_large_pages(view)
        assert laid.dtype == view.dtype
        assert laid.shape == view.shape
        assert mx.array_equal(laid, view)
        assert mx.array_equal(native.in_large_pages(laid), view)


def test_memory_is_given_back_with_the_last_array() -> None:
    """A model that goes leaves nothing behind; one array that stays keeps what it lies in."""
    small = native.in_large_pages(mx.arange(10))
    before = _resident_bytes()
    arrays = [native.in_large_pages(mx.full((1 << 20,), at, mx.float32)) for at in range(40)]
    assert _resident_bytes() > before + 35 * 4 * (1 << 20)
    assert all((array == at).all() for at, array in enumerate(arrays))
    del arrays
    gc.collect()
    mx.clear_cache()
    assert _resident_bytes() < before + 30 * 4 * (1 << 20)
    assert mx.array_equal(small, mx.arange(10))
