"""machd's own products on the CPU: right, and with the same bits whatever is computed beside a row."""

from __future__ import annotations

from collections.abc import Callable

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

_SMALL_GROUPS = (2, 3, 5, 6, 8)
"""Bits of affine weights that may share a scale by 16, as in K-quants of GGUF files."""

Weights = tuple[mx.array, mx.array | None, mx.array | None, dict[str, object]]


def _numbers(*shape: int, seed: int = 0) -> mx.array:
    return mx.array(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


def _packed(
    outputs: int, inputs: int, mode: str, group: int, bits: int, dtype: mx.Dtype = mx.float32
) -> Weights:
    plain = _numbers(outputs, inputs, seed=bits).astype(dtype)
    weights, scales, *rest = mx.quantize(plain, group, bits, mode)
    biases = rest[0] if rest else None
    return weights, scales, biases, {"mode": mode, "group": group, "bits": bits}


def _packed_by_16(outputs: int, inputs: int, bits: int) -> Weights:
    """Pack weights in groups of 16, which mlx does not: two groups of its own get other scales."""
    weights, scales, biases, named = _packed(outputs, inputs, "affine", 32, bits)
    assert scales is not None
    assert biases is not None
    each = mx.repeat(scales, 2, axis=1), mx.repeat(biases, 2, axis=1)
    other = 1 + mx.arange(each[0].shape[1]) % 2
    return weights, each[0] * other, each[1] * other, named | {"group": 16}


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
    **{f"affine{bits}-16": _packed_by_16(37, 384, bits) for bits in _SMALL_GROUPS},
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
def test_a_product_is_that_of_plain_loops(
    instruction_sets: list[str], name: str, rows: int
) -> None:
    """In every format, for few rows and many, on each instruction set of this processor."""
    x, weights = _numbers(rows, _inputs(name), seed=1), _EVERY[name]
    expected = _plainly(x, weights)
    for instruction_set in instruction_sets:
        native.use_instruction_set(instruction_set)
        difference = np.abs(_product(x, weights) - expected).max()
        assert difference <= _ROUNDING * np.abs(expected).max(), instruction_set


@pytest.mark.parametrize(
    ("mode", "group", "bits"),
    [
        *((mode, *sizes) for mode, sizes in _SCALED.items()),
        *(("affine", 64, bits) for bits in _BITS),
    ],
)
def test_weights_are_those_that_mlx_unpacks(mode: str, group: int, bits: int) -> None:
    """Times the unit matrix, a product gives the weights themselves: mlx's own, but for one rounding."""
    weights, scales, biases, named = _packed(24, 128, mode, group, bits)
    assert scales is not None
    unpacked = mx.dequantize(weights, scales, biases, group, bits, mode, dtype=mx.float32)
    found = _product(mx.eye(128), (weights, scales, biases, named)).T
    np.testing.assert_allclose(found, np.array(unpacked), rtol=2e-7, atol=2e-7)


@pytest.mark.parametrize("bits", _SMALL_GROUPS)
def test_groups_of_16_have_scales_of_their_own(instruction_sets: list[str], bits: int) -> None:
    """Times the unit matrix, a product gives each number times its own group's scale, and its bias, but for one rounding."""
    weights, scales, biases, named = _packed_by_16(24, 128, bits)
    assert scales is not None
    assert biases is not None
    ones, zeros = mx.ones((24, 4)), mx.zeros((24, 4))
    numbers = mx.dequantize(weights, ones, zeros, 32, bits, dtype=mx.float32).reshape(24, 8, 16)
    expected = (numbers * scales[..., None] + biases[..., None]).reshape(24, 128)
    for instruction_set in (*instruction_sets, "plain"):
        native.use_instruction_set(instruction_set)
        found = _product(mx.eye(128), (weights, scales, biases, named)).T
        np.testing.assert_allclose(found, np.array(expected), rtol=0, atol=1e-6)


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


def test_instruction_sets_add_in_one_order(instruction_sets: list[str]) -> None:
    """An answer that was computed on one processor comes out on another."""
    names = instruction_sets
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


def test_more_rows_than_are_worked_on_at_once() -> None:
    """A batch that is cut into parts gives the bits of each row alone, at the cut too."""
    weights = _EVERY["longer than a stretch"]
    x = _numbers(1030, 4096)
    together = _product(x, weights)
    for row in (0, 511, 512, 1023, 1024, 1029):
        assert np.array_equal(_product(x[row : row + 1], weights)[0], together[row])


@pytest.mark.parametrize("mode", _SCALED)
def test_every_code_is_the_number_that_mlx_has_for_it(
    instruction_sets: list[str], mode: str
) -> None:
    """Of weights and of scales, infinity and what is not a number too; in the plain loops as in the kernels."""
    group, bits = _SCALED[mode]
    inputs = 32  # all of a row alike, so that their sum is exact
    codes = np.arange(2**bits, dtype=np.uint8) * (17 if bits == 4 else 1)
    rows = np.repeat(np.tile(codes, 256)[:, None], inputs * bits // 8, axis=1)
    packed = mx.array(rows.view(np.uint32))
    scale_codes = np.arange(256, dtype=np.uint8).repeat(len(codes))
    scales = mx.array(np.repeat(scale_codes[:, None], inputs // group, axis=1))
    unpacked = mx.dequantize(packed, scales, None, group, bits, mode, dtype=mx.float32)
    weights = (packed, scales, None, {"mode": mode, "group": group, "bits": bits})
    for name in (*instruction_sets, "plain"):
        native.use_instruction_set(name)
        found = _product(mx.ones((1, inputs)), weights)[0]
        np.testing.assert_array_equal(found, np.array(inputs * unpacked[:, 0]), name)


@pytest.mark.parametrize("dtype", _PLAIN[1:])
def test_every_number_of_16_bits_is_read_as_it_is(
    instruction_sets: list[str], dtype: mx.Dtype
) -> None:
    """Infinity and what is not a number too; in the plain loops as in the kernels."""
    codes = mx.array(np.arange(65536, dtype=np.uint16)[:, None]).view(dtype)
    expected = np.array(codes.astype(mx.float32))[:, 0]
    for name in (*instruction_sets, "plain"):
        native.use_instruction_set(name)
        found = _product(mx.ones((1, 1)), (codes, None, None, {}))[0]
        np.testing.assert_array_equal(found, expected, name)


def test_nothing_gives_nothing() -> None:
    """Without rows there are no results; without inputs, or outputs, sums are zero, or there are none."""
    for name, weights in _EVERY.items():
        assert _product(mx.zeros((0, _inputs(name))), weights).shape == (0, 37)
        assert _product(mx.zeros((2, 0, _inputs(name))), weights).shape == (2, 0, 37)
    for rows in (1, 3, 9):
        for dtype in _PLAIN:
            found = _product(mx.zeros((rows, 0)), (mx.zeros((37, 0), dtype), None, None, {}))
            assert np.array_equal(found, np.zeros((rows, 37)))
            none = _product(mx.zeros((rows, 5)), (mx.zeros((0, 5), dtype), None, None, {}))
            assert none.shape == (rows, 0)


def test_other_dtypes() -> None:
    """16-bit rows are computed in float32 and given back in their dtype."""
    packed, scales, biases, named = _EVERY["affine4-64"]
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


@pytest.mark.parametrize("name", _EVERY)
def test_weights_that_lie_apart_in_memory(name: str) -> None:
    """Slices, transposed ones and repeated ones are read as they are seen."""
    packed, scales, biases, named = _EVERY[name]
    x = _numbers(6, _inputs(name))
    expected = _product(x, _EVERY[name])

    def seen(
        by: Callable[[mx.array], mx.array],
    ) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        several = (None if one is None else by(one) for one in (packed, scales, biases))
        first, *rest = several
        assert first is not None
        return _product(x, (first, rest[0], rest[1], named))

    assert np.array_equal(seen(lambda one: one[5:9]), expected[:, 5:9])
    assert np.array_equal(seen(lambda one: one[::-3]), expected[:, ::-3])
    assert np.array_equal(seen(lambda one: mx.contiguous(one.T).T), expected)
    repeated = seen(lambda one: mx.broadcast_to(one[3:4], one.shape))
    assert np.array_equal(repeated, np.repeat(expected[:, 3:4], 37, axis=1))


def test_a_part_of_larger_weights_is_not_copied() -> None:
    """Its rows lie one after another already, and a copy would cost as much as the product."""
    whole = mx.zeros((4096, 1024))
    x = mx.zeros((1, 1024))
    mx.eval(whole, x)
    part = whole[1024:3072]
    mx.eval(part)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(native.product(x, part))
    assert mx.get_peak_memory() - before < part.nbytes / 8


def test_a_graph_for_any_shape_takes_other_rows_and_refuses_other_sizes() -> None:
    """Compiled without shapes, a product knows the sizes it was traced with: it would read beyond others."""
    packed, scales, biases, named = _EVERY["affine4-64"]
    assert scales is not None
    assert biases is not None
    compiled = mx.compile(lambda *arrays: native.product(*arrays, **named), shapeless=True)
    for rows in (2, 9):
        x = _numbers(rows, 384)
        found = np.array(compiled(x, packed, scales, biases))
        assert np.array_equal(found, _product(x, _EVERY["affine4-64"]))
    x = _numbers(2, 384)
    for others in (
        (x[:, :64], packed, scales, biases),
        (x, packed[:20], scales, biases),
        (x, packed, scales[:, :3], biases),
        (x, packed, scales, biases[:9]),
    ):
        with pytest.raises(ValueError, match="compiled for other sizes"):
            mx.eval(compiled(*others))


def test_a_graph_keeps_the_instruction_set_it_was_built_with(instruction_sets: list[str]) -> None:
    """A choice that is made before it is computed is another graph's."""
    weights, names = _EVERY["affine4-64"], (*instruction_sets, "plain")
    packed, scales, biases, named = weights
    x = _numbers(5, 384)
    native.use_instruction_set(names[0])
    expected, waiting = _product(x, weights), native.product(x, packed, scales, biases, **named)
    assert not np.array_equal(_plainly(x, weights), expected)
    assert np.array_equal(np.array(waiting), expected)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"x": mx.zeros((2, 383))}, "as long as"),
        ({"x": mx.zeros((2, 384), mx.int32)}, "rows are float32"),
        ({"x": mx.zeros((2, 384), mx.complex64)}, "rows are float32"),
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
