"""KV formats encode keys and values, and caches in a format keep them through joins and moves."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engines.tiny_engines import loaded
from support.engines.tiny_models import TinyKind

from machd.engine.kernels.cpu_attention import attend, attend_rows
from machd.engine.kv.batch_lane import BatchLaneKv
from machd.engine.kv.formats import kv_format_named
from machd.engine.kv.kv_format import PLAIN, KvFormat, KvWidths
from machd.engine.kv.lane_kv import PrefilledRow
from machd.engine.kv.layers.slab import SlabKv
from machd.engine.kv.quantized_cache import QuantizedCache
from machd.engine.kv.row_caches import kv_arrays, make_row_caches
from machd.engine.kv.row_positions import RowPositions
from machd.engine.kv.slab_layout import OneSlab
from machd.engine.loading.cache_facts import measure_model

_CODED = ("affine8", "affine4", "turboquant")
_EVERY = ("none", *_CODED)
_STEPS = {"affine8": 255, "affine4": 15}
_HEADS = 2

_formats = pytest.mark.parametrize("name", _EVERY)
_coded = pytest.mark.parametrize("name", _CODED)


def _random(*shape: int, seed: int = 0) -> mx.array:
    return mx.array(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


def _decoded(
    kv_format: KvFormat, keys: mx.array, values: mx.array
) -> tuple[tuple[mx.array, ...], mx.array, mx.array]:
    arrays = kv_format.encode(keys, values)
    near_keys, near_values = kv_format.decode(arrays, KvWidths.of(keys, values))
    return arrays, near_keys, near_values


@_formats
@pytest.mark.parametrize(
    ("key_width", "value_width"),
    [(64, 64), (128, 128), (80, 80), (96, 96), (160, 160), (16, 16), (7, 9), (1, 1), (512, 64)],
)
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
def test_decoding_restores_every_width(
    name: str, key_width: int, value_width: int, dtype: mx.Dtype
) -> None:
    """Decoding restores shapes and dtypes and nearly the vectors; each array has every position."""
    keys = _random(2, _HEADS, 5, key_width).astype(dtype)
    values = _random(2, _HEADS, 5, value_width, seed=1).astype(dtype)

    arrays, near_keys, near_values = _decoded(kv_format_named(name), keys, values)

    assert all(array.shape[0] == 2 and array.shape[2] == 5 for array in arrays)
    for exact, near in ((keys, near_keys), (values, near_values)):
        assert (near.shape, near.dtype) == (exact.shape, exact.dtype)
        error = mx.square((near - exact).astype(mx.float32)).sum()
        assert float(error / mx.square(exact.astype(mx.float32)).sum()) < 0.02


@_formats
def test_format_keeps_keys_of_a_layer_without_values(name: str) -> None:
    """Values of width 0, which some layers keep, pass through."""
    keys, values = _random(1, _HEADS, 3, 64), mx.zeros((1, _HEADS, 3, 0))

    _, near_keys, near_values = _decoded(kv_format_named(name), keys, values)

    assert near_keys.shape == keys.shape
    assert near_values.shape == values.shape


@pytest.mark.parametrize("name", _STEPS)
@settings(max_examples=60, deadline=None)
@given(
    numbers=st.lists(
        st.floats(-1000, 1000, width=32, allow_subnormal=False), min_size=64, max_size=64
    ),
    scale=st.sampled_from([1e-3, 1.0, 50.0]),
)
def test_affine_error_is_at_most_half_a_step(name: str, numbers: list[float], scale: float) -> None:
    """Half a step of its group's range, and one at the far end, where mlx moves the range to hold 0."""
    vector = mx.array(numbers, dtype=mx.float32).reshape(1, 1, 1, 64) * scale
    _, near, _ = _decoded(kv_format_named(name), vector, vector)
    step = float(vector.max() - vector.min()) / _STEPS[name]
    errors = np.sort(np.abs(np.array(near - vector)).ravel())
    rounding = 1e-5 * float(mx.abs(vector).max()) + 1e-5

    # mlx makes 0 one of the values, which may move the grid by up to half a step over its length.
    assert errors[-1] <= 1.05 * step + rounding
    assert float(np.median(errors)) <= 0.55 * step + rounding


@pytest.mark.parametrize(
    ("head_dim", "least"), [(64, 1.8), (80, 1.8), (96, 1.8), (128, 1.8), (256, 1.8)]
)
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_affine8_shrinks_a_position(head_dim: int, least: float, dtype: mx.Dtype) -> None:
    """A position costs at least 1.8 times less, whatever the dtype, scales and offsets included."""
    vectors = _random(1, _HEADS, 4, head_dim).astype(dtype)
    plain = sum(array.nbytes for array in PLAIN.encode(vectors, vectors))
    small = sum(array.nbytes for array in kv_format_named("affine8").encode(vectors, vectors))

    assert plain / small >= least


@_coded
def test_encoding_of_a_position_does_not_depend_on_others(name: str) -> None:
    """A position's columns are the same whatever is encoded with it, to the bit."""
    kv_format = kv_format_named(name)
    keys, values = _random(3, _HEADS, 20, 64), _random(3, _HEADS, 20, 64, seed=1)
    together = kv_format.encode(keys, values)
    for row, token in ((0, 0), (1, 7), (2, 19)):
        place = slice(row, row + 1), slice(None), slice(token, token + 1)
        alone = kv_format.encode(keys[place], values[place])
        for one, other in zip(alone, together, strict=True):
            if name == "turboquant":
                # A rotation adds in an order that depends on how many are rotated.
                assert float(mx.mean(one == other[place])) > 0.9
            else:
                assert mx.array_equal(one, other[place])


@_formats
def test_quantized_cache_reads_the_same_however_a_prompt_is_cut(name: str) -> None:
    """A cache reads the same written in one piece, in many, filled from arrays, and after a trim."""
    kv_format = kv_format_named(name)
    keys, values = _random(1, _HEADS, 300, 64), _random(1, _HEADS, 300, 64, seed=1)
    whole, cut = QuantizedCache(kv_format), QuantizedCache(kv_format)
    expected = whole.update_and_fetch(keys, values)
    for begin, end in ((0, 1), (1, 250), (250, 280), (280, 299)):
        cut.update_and_fetch(keys[:, :, begin:end], values[:, :, begin:end])
    filled = QuantizedCache(kv_format)
    SlabKv.fill_columns(filled, [array[:, :, :299] for array in kv_arrays(cut) or ()], 299)
    assert filled.trim(9) == 9
    filled.update_and_fetch(keys[:, :, 290:299], values[:, :, 290:299])

    for cache in (cut, filled):
        assert cache.offset == cache.size() == 299
        heard = cache.update_and_fetch(keys[:, :, 299:], values[:, :, 299:])
        for one, other in zip(expected, heard, strict=True):
            assert float(mx.mean(mx.abs(one - other) < 1e-5)) > 0.999
    assert whole.nbytes == sum(array.nbytes for array in whole.state)
    assert not whole.empty()
    assert QuantizedCache(kv_format).empty()


class _Rows:
    """A batch of one layer beside the same rows in caches of their own."""

    def __init__(self, name: str) -> None:
        self.kv_format = kv_format_named(name)
        self.batch = BatchLaneKv(8)
        self.alone: list[QuantizedCache] = []
        self.seed = 0

    def join(self, length: int, limit: int) -> None:
        """Add a row with so many positions."""
        single = QuantizedCache(self.kv_format)
        if length:
            single.update_and_fetch(*self._tokens(1, length))
        self.batch.join(PrefilledRow([single], length, limit, 0))
        self.alone.append(single)

    def keep(self, *order: int) -> None:
        """Keep these rows, in that order."""
        self.batch.select(order)
        self.alone = [self.alone[place] for place in order]

    def step(self) -> None:
        """Write a token a row; each row reads what it reads alone, to the bit."""
        keys, values = self._tokens(len(self.alone), 1)
        self.batch.begin_pass()
        (layer,) = self.batch.caches
        together = layer.update_and_fetch(keys, values)
        for row, single in enumerate(self.alone):
            place = slice(row, row + 1)
            expected = single.update_and_fetch(keys[place], values[place])
            for one, other in zip(expected, together, strict=True):
                same = mx.abs(one - other[place, :, : single.offset]) < 1e-5
                assert float(mx.mean(same)) > 0.999

    def _tokens(self, rows: int, tokens: int) -> tuple[mx.array, mx.array]:
        self.seed += 2
        shape = rows, _HEADS, tokens, 64
        return _random(*shape, seed=self.seed), _random(*shape, seed=self.seed + 1)


@_coded
def test_batched_rows_read_as_single_rows(name: str) -> None:
    """A batch's rows read as single rows do through joins, moves, growth at 256 and a new layout."""
    rows = _Rows(name)
    for length in (5, 254, 0, 40):
        rows.join(length, 400)
        rows.step()
    for _ in range(4):
        rows.step()
    rows.keep(3, 1)
    rows.step()
    rows.join(17, 60)
    rows.keep(2, 0)
    rows.step()
    rows.keep(0)
    rows.step()

    (layer,) = rows.batch.caches
    assert layer.arrays[0].shape[2] < 400


@_coded
def test_join_copies_encoded_arrays(name: str) -> None:
    """A joined row's arrays equal its arrays alone, bit by bit."""
    rows = _Rows(name)
    rows.join(9, 20)
    rows.join(13, 20)

    (layer,) = rows.batch.caches
    for row, single in enumerate(rows.alone):
        for array, own in zip(layer.arrays, single.arrays, strict=True):
            place = array[row : row + 1, :, : single.offset]
            assert mx.array_equal(place, own[:, :, : single.offset])


@_coded
def test_wipe_zeroes_one_row(name: str) -> None:
    """Wiping zeroes the row in every array and leaves the others."""
    rows = _Rows(name)
    rows.join(9, 20)
    rows.join(13, 20)
    (layer,) = rows.batch.caches
    before = [mx.array(array[1]) for array in layer.arrays]

    rows.batch.wipe(0)

    for array, other in zip(layer.arrays, before, strict=True):
        assert not mx.any(array[0])
        assert mx.array_equal(array[1], other)


@_formats
@pytest.mark.parametrize("lengths", [(40, 40, 40), (3, 200, 90), (700, 5, 9)])
def test_attention_over_unpacked_codes_equals_decoded_attention(
    name: str, lengths: tuple[int, ...]
) -> None:
    """Attention over unpacked codes equals attention over decoded keys and values."""
    kv_format = kv_format_named(name)
    positions = RowPositions(OneSlab(len(lengths)))
    slab = SlabKv(positions, kv_format)
    for row, length in enumerate(lengths):
        positions.append(length, length + 50)
        arrays = kv_format.encode(_random(1, 3, length, 64, seed=row), _random(1, 3, length, 64))
        slab.place(row, arrays)
    rows = len(lengths)
    queries, keys, values = (_random(rows, heads, 1, 64, seed=heads) for heads in (9, 3, 3))
    positions.begin_pass()

    heard = attend_rows(queries, keys, values, slab, scale=0.125)

    for row, length in enumerate(lengths):
        seen = slab.decoded(row, row + 1, length + 1)
        expected = attend(queries[row : row + 1], *seen, scale=0.125, mask=None)
        # Halves of bytes are told apart by a difference of sums sixteen times as large.
        assert float(mx.abs(heard[row : row + 1] - expected).max()) < 2e-4


def test_measured_costs_are_those_of_the_format() -> None:
    """Measured costs are those of the KV format, and measured classes the model's own."""
    model = loaded(TinyKind.ROTATING).model
    plain, small = measure_model(model), measure_model(model, kv_format_named("affine8"))

    assert small.cache.layers == plain.cache.layers
    assert small.cache.kind is plain.cache.kind
    assert small.cache.bytes_per_token < plain.cache.bytes_per_token


def test_only_standard_caches_are_in_the_format() -> None:
    """Windows and states stay as the model makes them; lists are opened."""
    for kind in TinyKind:
        model = loaded(kind).model
        pairs = zip(
            make_row_caches(model), make_row_caches(model, kv_format_named("affine4")), strict=True
        )
        for own, ours in pairs:
            names = {type(own).__name__, type(ours).__name__}
            assert names in ({"KVCache", "QuantizedCache"}, {type(own).__name__})


def test_format_names_are_distinct() -> None:
    """Blocks of two formats never meet: the name is in their key."""
    assert {kv_format_named(name).name for name in _EVERY} == set(_EVERY)
