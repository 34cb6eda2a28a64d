"""machd's own products on the CPU: right, and with the same bits whatever is computed beside a row."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

native = pytest.importorskip("machd_native", reason="make setup has found no compiler")

_BITS = (2, 3, 4, 5, 6, 8)
_GROUPS = (32, 64, 128)
_SCALED = {"mxfp4": (32, 4), "mxfp8": (32, 8), "nvfp4": (16, 4)}
_PLAIN = (mx.float32, mx.float16, mx.bfloat16)
_ROUNDING = 2e-6
"""Largest difference, as a share of the largest result, for sums of up to 4,096 products."""

Weights = tuple[mx.array, mx.array | None, mx.array | None, dict[str, object]]


def _instruction_sets() -> list[str]:
    names = []
    for name in ("avx512", "avx2", "neon"):
        try:
            native.use_instruction_set(name)
        except ValueError:
            continue
        names.append(name)
    native.use_instruction_set("")
    return names


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    threads = native.thread_count()
    yield
    native.use_instruction_set("")
    native.set_thread_count(threads)


def _numbers(*shape: int, seed: int = 0) -> mx.array:
    return mx.array(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


def _packed(
    outputs: int, inputs: int, mode: str, group: int, bits: int, dtype: mx.Dtype = mx.float32
) -> Weights:
    plain = _numbers(outputs, inputs, seed=bits).astype(dtype)
    weights, scales, *rest = mx.quantize(plain, group, bits, mode)
    biases = rest[0] if rest else None
    return weights, scales, biases, {"mode": mode, "group": group, "bits": bits}


def _product(x: mx.array, weights: Weights) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    packed, scales, biases, named = weights
    return np.array(native.product(x, packed, scales, biases, **named))


def _plainly(x: mx.array, weights: Weights) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    native.use_instruction_set("plain")
    return _product(x, weights)


_EVERY: dict[str, Weights] = {
    **{
        f"affine{bits}-{group}": _packed(37, 384, "affine", group, bits)
        for bits in _BITS
        for group in _GROUPS
    },
    **{
        f"affine4-{str(dtype).removeprefix('mlx.core.')}": _packed(37, 384, "affine", 64, 4, dtype)
        for dtype in _PLAIN[1:]
    },
    **{mode: _packed(37, 384, mode, *sizes) for mode, sizes in _SCALED.items()},
    **{
        str(dtype).removeprefix("mlx.core."): (
            _numbers(37, 203).astype(dtype),
            None,
            None,
            {},
        )
        for dtype in _PLAIN
    },
    "longer than a stretch": _packed(37, 4096, "affine", 64, 4),
}


def _inputs(name: str) -> int:
    packed, _, _, named = _EVERY[name]
    bits = named.get("bits", 32)
    assert isinstance(bits, int)
    return packed.shape[1] * 32 // bits


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 13, 64])
@pytest.mark.parametrize("name", _EVERY)
def test_a_product_is_that_of_plain_loops(name: str, rows: int) -> None:
    """In every format, for few rows and many, on each instruction set of this processor."""
    x, weights = _numbers(rows, _inputs(name), seed=1), _EVERY[name]
    expected = _plainly(x, weights)
    for instruction_set in _instruction_sets():
        native.use_instruction_set(instruction_set)
        difference = np.abs(_product(x, weights) - expected).max()
        assert difference <= _ROUNDING * np.abs(expected).max(), instruction_set


@pytest.mark.parametrize("mode", [*_SCALED, "affine"])
def test_weights_are_those_that_mlx_unpacks(mode: str) -> None:
    """Times the unit matrix, a product gives the weights themselves: mlx's own, but for one rounding."""
    group, bits = _SCALED.get(mode, (64, 4))
    weights, scales, biases, named = _packed(24, 128, mode, group, bits)
    assert scales is not None
    unpacked = mx.dequantize(weights, scales, biases, group, bits, mode, dtype=mx.float32)
    found = _product(mx.eye(128), (weights, scales, biases, named)).T
    np.testing.assert_allclose(found, np.array(unpacked), rtol=2e-7, atol=2e-7)


@given(
    name=st.sampled_from(sorted(_EVERY)),
    rows=st.integers(1, 40),
    threads=st.integers(1, 3),
    data=st.data(),
)
def test_a_rows_bits_depend_on_nothing_beside_it(
    name: str, rows: int, threads: int, data: st.DataObject
) -> None:
    """Alone, among any rows, on any number of threads."""
    weights, x = _EVERY[name], _numbers(rows, _inputs(name), seed=rows)
    native.set_thread_count(threads)
    together = _product(x, weights)
    begin = data.draw(st.integers(0, rows - 1))
    end = data.draw(st.integers(begin + 1, rows))
    native.set_thread_count(1)
    assert np.array_equal(_product(x[begin:end], weights), together[begin:end])


def test_instruction_sets_add_in_one_order() -> None:
    """An answer that was computed on one processor comes out on another."""
    names = _instruction_sets()
    if len(names) == 1:
        pytest.skip("this processor has one of them")
    for name, weights in _EVERY.items():
        x = _numbers(7, _inputs(name))
        found = []
        for instruction_set in names:
            native.use_instruction_set(instruction_set)
            found.append(_product(x, weights))
        assert all(np.array_equal(found[0], one) for one in found[1:]), name


def test_what_is_not_finite_stays_in_its_row() -> None:
    """A row with NaN or infinity spoils no other row, and an output's weights no other output."""
    weights = _EVERY["affine4-64"]
    x = _numbers(9, 384)
    expected = _product(x, weights)
    spoilt = np.array(x)
    spoilt[2, 5], spoilt[4, 0] = np.nan, np.inf
    found = _product(mx.array(spoilt), weights)
    kept = [0, 1, 3, 5, 6, 7, 8]
    assert np.array_equal(found[kept], expected[kept])
    assert np.isnan(found[2]).all()
    assert not np.isfinite(found[4]).any()
    packed, scales, biases, named = weights
    assert scales is not None
    broken = np.array(scales)
    broken[3, 1] = np.nan
    found = _product(x, (packed, mx.array(broken), biases, named))
    assert np.isnan(found[:, 3]).all()
    assert np.array_equal(np.delete(found, 3, axis=1), np.delete(expected, 3, axis=1))


def test_no_rows_and_other_dtypes() -> None:
    """Nothing gives nothing; 16-bit rows are computed in float32 and given back in their dtype."""
    packed, scales, biases, named = _EVERY["affine4-64"]
    assert native.product(mx.zeros((0, 384)), packed, scales, biases, **named).shape == (0, 37)
    x = _numbers(2, 3, 384).astype(mx.bfloat16)
    found = native.product(x, packed, scales, biases, **named)
    assert (found.dtype, found.shape) == (mx.bfloat16, (2, 3, 37))
    wide = native.product(x.astype(mx.float32), packed, scales, biases, **named)
    assert mx.array_equal(found, wide.astype(mx.bfloat16))


def test_rows_that_lie_apart_in_memory() -> None:
    """A transposed array and a slice are read as they are seen."""
    weights = _EVERY["affine4-64"]
    x = _numbers(384, 12)
    assert np.array_equal(_product(x.T, weights), _product(mx.array(np.array(x).T), weights))
    assert np.array_equal(_product(x.T[::3], weights), _product(x.T, weights)[::3])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"x": mx.zeros((2, 383))}, "as long as"),
        ({"weights": mx.zeros((37, 48), mx.int32)}, "uint32"),
        ({"weights": mx.zeros((37, 48, 1), mx.uint32)}, "two axes"),
        ({"scales": None}, "have scales"),
        ({"scales": mx.zeros((37, 5))}, "one entry for each group"),
        ({"biases": None}, "like scales"),
        ({"biases": mx.zeros((37, 6), mx.float16)}, "like scales"),
        ({"scales": mx.zeros((37, 6), mx.int32)}, "float32"),
        ({"bits": 7}, "within a weight"),
        ({"bits": 9}, "no kernel"),
        ({"group": 8}, "no kernel"),
        ({"group": 0}, "no kernel"),
        ({"group": -64}, "no kernel"),
        ({"mode": "plain"}, "plain weights"),
        ({"mode": "int4"}, "uint8"),
    ],
)
def test_what_does_not_fit_together_is_refused_before_anything_is_read(
    change: dict[str, object], said: str
) -> None:
    """MLX does not look at sizes: a kernel would read beyond an array."""
    packed, scales, biases, named = _EVERY["affine4-64"]
    given_arguments = {
        "x": mx.zeros((2, 384)),
        "weights": packed,
        "scales": scales,
        "biases": biases,
        **named,
        **change,
    }
    with pytest.raises(ValueError, match=said):
        native.product(**given_arguments)


def test_an_unknown_instruction_set_is_refused() -> None:
    """By its name."""
    with pytest.raises(ValueError, match="sse9"):
        native.use_instruction_set("sse9")
