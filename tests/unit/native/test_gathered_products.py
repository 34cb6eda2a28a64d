"""Products with the weights of experts: of each row those of `product` with its own expert, to the bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

native = pytest.importorskip("machd_native", reason="make setup has found no compiler")

_EXPERTS, _OUTPUTS = 5, 37
_PLAIN = (mx.float32, mx.float16, mx.bfloat16)
_PACKED = {
    **{f"affine{bits}": ("affine", 64, bits) for bits in (2, 3, 4, 5, 6, 8)},
    "mxfp4": ("mxfp4", 32, 4),
    "mxfp8": ("mxfp8", 32, 8),
    "nvfp4": ("nvfp4", 16, 4),
}
_ROUNDING = 2e-6

Weights = tuple[mx.array, mx.array | None, mx.array | None, dict[str, object]]
Floats = np.ndarray[tuple[int, ...], np.dtype[np.float32]]


def _numbers(*shape: int, seed: int = 0) -> mx.array:
    return mx.array(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


def _packed(inputs: int, mode: str, group: int, bits: int, dtype: mx.Dtype = mx.float32) -> Weights:
    plain = _numbers(_EXPERTS, _OUTPUTS, inputs, seed=bits).astype(dtype)
    weights, scales, *rest = mx.quantize(plain, group, bits, mode)
    biases = rest[0] if rest else None
    return weights, scales, biases, {"mode": mode, "group": group, "bits": bits}


def _packed_by_16(inputs: int, bits: int) -> Weights:
    """Pack weights in groups of 16, which mlx does not: two groups of its own get other scales."""
    weights, scales, biases, named = _packed(inputs, "affine", 32, bits)
    assert scales is not None
    assert biases is not None
    each = mx.repeat(scales, 2, axis=2), mx.repeat(biases, 2, axis=2)
    other = 1 + mx.arange(each[0].shape[2]) % 2
    return weights, each[0] * other, each[1] * other, named | {"group": 16}


_EVERY: dict[str, Weights] = {
    **{f"affine{bits}-16": _packed_by_16(192, bits) for bits in (2, 3, 5, 6, 8)},
    **{name: _packed(192, *sizes) for name, sizes in _PACKED.items()},
    "affine4 with bfloat16 scales": _packed(192, "affine", 64, 4, mx.bfloat16),
    **{
        str(dtype).removeprefix("mlx.core."): (
            _numbers(_EXPERTS, _OUTPUTS, 203).astype(dtype),
            None,
            None,
            {},
        )
        for dtype in _PLAIN
    },
    "longer than a stretch": _packed(4096, "affine", 64, 4),
}
_SHAPES = [
    ((3, 1, 1), (3, 2)),  # tokens of one row, from mlx-lm's switch layers
    ((2, 3, 1, 1), (2, 3, 4)),
    ((20, 1), (20,)),  # the same in the order of their experts
    ((2, 3, 4, 1), (2, 3, 4)),  # a row for each of a token's experts
    ((3, 4), (3,)),  # matrices of several rows
    ((2, 1, 1, 4), (2, 3, 2)),
    ((4,), (2, 5)),  # one matrix with every expert
    ((2, 3, 4, 6), (1, 4)),  # indices repeated
    ((1,), ()),
]
"""Of x, its inputs left out, and of the indices."""


def _inputs(name: str) -> int:
    packed, _, _, named = _EVERY[name]
    bits = named.get("bits", 32)
    assert isinstance(bits, int)
    return packed.shape[-1] * 32 // bits


def _gathered(x: mx.array, weights: Weights, indices: Sequence[int] | mx.array) -> Floats:
    packed, scales, biases, named = weights
    chosen = indices if isinstance(indices, mx.array) else mx.array(list(indices), mx.uint32)
    return np.array(native.gathered_product(x, packed, scales, biases, chosen, **named))


def _alone(row: mx.array, weights: Weights, expert: int) -> Floats:
    """Multiply one row with one expert's weights, by `product`."""
    packed, scales, biases, named = weights
    its = [None if one is None else one[expert] for one in (packed, scales, biases)]
    return np.array(native.product(row[None], *its, **named)).reshape(-1)


@given(
    name=st.sampled_from(sorted(_EVERY)),
    chosen=st.lists(st.integers(0, _EXPERTS - 1), min_size=1, max_size=16),
    threads=st.integers(1, 3),
    order=st.sampled_from([list, sorted]),
    seed=st.integers(0, 3),
)
def test_a_row_has_the_bits_of_its_own_experts_product(
    name: str,
    chosen: list[int],
    threads: int,
    order: Callable[[list[int]], list[int]],
    seed: int,
) -> None:
    """In any order and company, on any number of threads."""
    weights = _EVERY[name]
    x = _numbers(len(chosen), 1, _inputs(name), seed=seed)
    experts = order(chosen)
    native.set_thread_count(threads)
    found = _gathered(x, weights, experts)
    native.set_thread_count(1)
    expected = [_alone(x[row, 0], weights, expert) for row, expert in enumerate(experts)]
    assert np.array_equal(found[:, 0], np.array(expected))


@pytest.mark.parametrize("name", _EVERY)
def test_every_format_on_every_instruction_set(instruction_sets: list[str], name: str) -> None:
    """One to sixteen rows of an expert, beside those of others; in the plain loops as in the kernels."""
    weights, counts = _EVERY[name], (1, 2, 5, 16, 3)
    experts = np.random.default_rng(1).permutation(np.repeat(np.arange(_EXPERTS), counts))
    x = _numbers(experts.size, 1, _inputs(name))
    for instruction_set in (*instruction_sets, "plain"):
        native.use_instruction_set(instruction_set)
        found = _gathered(x, weights, experts.tolist())[:, 0]
        expected = [_alone(x[row, 0], weights, expert) for row, expert in enumerate(experts)]
        assert np.array_equal(found, np.array(expected)), instruction_set


@pytest.mark.parametrize("index_dtype", [mx.uint32, mx.int32])
@pytest.mark.parametrize(("rows", "choice"), _SHAPES)
@pytest.mark.parametrize("name", ["affine4", "float32"])
def test_shapes_are_broadcast_as_mlx_does(
    name: str, rows: tuple[int, ...], choice: tuple[int, ...], index_dtype: mx.Dtype
) -> None:
    """The result of ``mx.gather_qmm`` and ``mx.gather_mm``, up to rounding."""
    packed, scales, biases, _ = _EVERY[name]
    x = _numbers(*rows, _inputs(name))
    drawn = np.random.default_rng(2).integers(0, _EXPERTS, choice)
    indices = mx.array(drawn).astype(index_dtype)
    if scales is None:
        right = mx.gather_mm(x, packed.swapaxes(-1, -2), rhs_indices=indices)
    else:
        right = mx.gather_qmm(
            x, packed, scales, biases, rhs_indices=indices, group_size=64, bits=4, mode="affine"
        )
    expected, found = np.array(right), _gathered(x, _EVERY[name], indices)
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() <= _ROUNDING * np.abs(expected).max()


def test_more_rows_of_an_expert_than_are_worked_on_at_once() -> None:
    """A prompt whose tokens choose few experts, sorted and not, gives the bits of each row alone."""
    weights = _EVERY["longer than a stretch"]
    x = _numbers(1100, 1, 4096)
    experts = np.where(np.arange(1100) % 50 == 0, 3, 1)
    for order in (np.arange(1100), np.argsort(experts, kind="stable")):
        found = _gathered(x[mx.array(order)], weights, experts[order].tolist())
        for place in (0, 1, 49, 511, 512, 1023, 1099):
            row = int(order[place])
            assert np.array_equal(found[place, 0], _alone(x[row, 0], weights, int(experts[row])))


@pytest.mark.parametrize("index", [_EXPERTS, 2**31 - 1, -1, -(2**31)])
@pytest.mark.parametrize("threads", [1, 2])
def test_an_index_that_is_no_experts_gives_nan_in_its_row_alone(index: int, threads: int) -> None:
    """MLX would read whatever lies there; other rows of the batch are right."""
    native.set_thread_count(threads)
    x, weights = _numbers(4, 1, 192), _EVERY["affine4"]
    found = _gathered(x, weights, mx.array([0, index, 1, index], mx.int32))
    assert np.isnan(found[[1, 3]]).all()
    assert np.array_equal(found[[0, 2]], _gathered(x, weights, [0, 0, 1, 0])[[0, 2]])
    assert np.isnan(_gathered(x, weights, mx.full((4,), index, mx.int32))).all()


def test_what_is_not_finite_stays_in_its_row() -> None:
    """Of rows of one expert, too."""
    weights = _EVERY["affine4"]
    x, experts = _numbers(7, 1, 192), [1, 0, 1, 1, 1, 1, 1]
    expected = _gathered(x, weights, experts)
    spoilt = np.array(x)
    spoilt[2, 0, 5] = np.nan
    found = _gathered(mx.array(spoilt), weights, experts)
    assert np.isnan(found[2]).all()
    assert np.array_equal(np.delete(found, 2, axis=0), np.delete(expected, 2, axis=0))


def test_nothing_gives_nothing() -> None:
    """Without pairs or rows there are no results; without inputs sums are zero."""
    for name, weights in _EVERY.items():
        x = mx.zeros((0, 1, _inputs(name)))
        assert _gathered(x, weights, []).shape == (0, 1, _OUTPUTS)
        assert _gathered(mx.zeros((2, 0, _inputs(name))), weights, [0, 1]).shape == (2, 0, _OUTPUTS)
    empty: Weights = (mx.zeros((_EXPERTS, _OUTPUTS, 0)), None, None, {})
    assert np.array_equal(_gathered(mx.zeros((2, 1, 0)), empty, [1, 1]), np.zeros((2, 1, _OUTPUTS)))
    none: Weights = (mx.zeros((0, _OUTPUTS, 5)), None, None, {})
    assert _gathered(mx.zeros((0, 1, 5)), none, []).shape == (0, 1, _OUTPUTS)
    assert np.isnan(_gathered(mx.zeros((1, 1, 5)), none, [0])).all()


def test_other_dtypes() -> None:
    """16-bit rows are computed in float32 and given back in their dtype."""
    packed, scales, biases, named = _EVERY["affine4"]
    x, indices = _numbers(2, 3, 192).astype(mx.bfloat16), mx.array([1, 4], mx.uint32)
    found = native.gathered_product(x, packed, scales, biases, indices, **named)
    assert (found.dtype, found.shape) == (mx.bfloat16, (2, 3, _OUTPUTS))
    wide = _gathered(x.astype(mx.float32), _EVERY["affine4"], indices)
    assert mx.array_equal(found, mx.array(wide).astype(mx.bfloat16))


@pytest.mark.parametrize("name", ["affine3", "mxfp4", "bfloat16"])
def test_arrays_that_lie_apart_in_memory(name: str) -> None:
    """Slices, transposed and repeated ones are read as they are seen."""
    packed, scales, biases, named = weights = _EVERY[name]
    x, experts = _numbers(6, 1, _inputs(name)), [0, 2, 0, 1, 2, 2]
    expected = _gathered(x, weights, experts)

    def seen(by: Callable[[mx.array], mx.array], indices: Sequence[int] = experts) -> Floats:
        first, *rest = (None if one is None else by(one) for one in (packed, scales, biases))
        assert first is not None
        return _gathered(x, (first, rest[0], rest[1], named), indices)

    assert np.array_equal(seen(lambda one: one[1:], [0, 1, 0, 0, 1, 1])[[1, 3]], expected[[1, 3]])
    assert np.array_equal(seen(lambda one: one[:, ::-3]), expected[..., ::-3])
    assert np.array_equal(seen(lambda one: mx.contiguous(one.T).T), expected)
    repeated = seen(lambda one: mx.broadcast_to(one[:1], one.shape))
    assert np.array_equal(repeated, _gathered(x, weights, [0] * 6))
    strided = mx.array([[one, 9] for one in experts], mx.uint32)[:, 0]
    assert np.array_equal(_gathered(x, weights, strided), expected)
    columns = mx.contiguous(x.T).T
    assert np.array_equal(_gathered(columns, weights, experts), expected)


def test_a_graph_for_any_shape_takes_other_rows_and_refuses_other_sizes() -> None:
    """Compiled without shapes, a product knows the sizes it was traced with: it would read beyond others."""
    packed, scales, biases, named = _EVERY["affine4"]
    assert scales is not None
    assert biases is not None
    compiled = mx.compile(lambda *arrays: native.gathered_product(*arrays, **named), shapeless=True)
    for experts in ([1, 2], [4, 0, 1, 1, 1, 1, 3]):
        x = _numbers(len(experts), 1, 192)
        found = np.array(compiled(x, packed, scales, biases, mx.array(experts, mx.uint32)))
        assert np.array_equal(found, _gathered(x, _EVERY["affine4"], experts))
    x, indices = _numbers(2, 1, 192), mx.array([0, 1], mx.uint32)
    for others in (
        (x[..., :64], packed, scales, biases, indices),
        (x, packed[:3], scales, biases, indices),
        (x, packed, scales[:, :20], biases, indices),
        (x, packed, scales, biases[:3], indices),
    ):
        with pytest.raises(ValueError, match="compiled for other sizes"):
            mx.eval(compiled(*others))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"x": mx.zeros((2, 1, 191))}, "as long as"),
        ({"x": mx.zeros(192)}, "as long as"),
        ({"x": mx.zeros((3, 1, 192))}, "broadcast"),
        ({"x": mx.zeros((2, 1, 192), mx.int32)}, "rows are float32"),
        ({"indices": mx.zeros(2)}, "uint32 or int32"),
        ({"indices": mx.zeros(2, mx.int64)}, "uint32 or int32"),
        ({"weights": mx.zeros((_OUTPUTS, 24), mx.uint32)}, "three axes"),
        ({"scales": None}, "have scales"),
        ({"scales": mx.zeros((_EXPERTS, _OUTPUTS, 2))}, "one entry for each group"),
        ({"scales": mx.zeros((_OUTPUTS, 3))}, "one entry for each group"),
        ({"biases": None}, "like scales"),
        ({"biases": mx.zeros((_EXPERTS - 1, _OUTPUTS, 3))}, "like scales"),
        ({"bits": 9}, "no kernel"),
        ({"mode": "plain"}, "plain weights"),
    ],
)
def test_what_does_not_fit_together_is_refused_before_anything_is_read(
    change: dict[str, object], said: str
) -> None:
    """MLX does not look at sizes: a kernel would read beyond an array."""
    packed, scales, biases, named = _EVERY["affine4"]
    given_arguments = {
        "x": mx.zeros((2, 1, 192)),
        "weights": packed,
        "scales": scales,
        "biases": biases,
        "indices": mx.array([0, 1], mx.uint32),
        **named,
        **change,
    }
    with pytest.raises(ValueError, match=said):
        native.gathered_product(**given_arguments)
