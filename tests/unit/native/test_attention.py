"""machd's own attention on the CPU: right, and with the same bits in every company."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

native = pytest.importorskip("machd_native", reason="make setup has found no compiler")

_ROUNDING = 3e-6
"""Largest difference, for values around one."""

_SCALE = 0.125


def _numbers(*shape: int, seed: int = 0) -> mx.array:
    return mx.array(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


def _int32(*numbers: int) -> mx.array:
    return mx.array(list(numbers), dtype=mx.int32)


def _attend(
    queries: mx.array, keys: mx.array, values: mx.array, *starts: int, **named: object
) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    return np.array(native.attend(queries, keys, values, _int32(*starts), scale=_SCALE, **named))


@pytest.mark.parametrize("head_dims", [(64, 64), (16, 48), (128, 128), (80, 96)])
@pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (4, 4), (71, 1), (8, 2)])
@pytest.mark.parametrize(
    ("tokens", "starts"),
    [(1, (0, 7, 64)), (1, (63, 150, 129)), (50, (0, 3, 100)), (17, (64, 63, 1))],
)
def test_attention_is_that_of_plain_loops(
    instruction_sets: list[str],
    head_dims: tuple[int, int],
    heads: int,
    kv_heads: int,
    tokens: int,
    starts: tuple[int, ...],
) -> None:
    """Of rows with different lengths, over one block and several, with and without a window, on each instruction set."""
    columns = max(starts) + tokens + 5
    queries = _numbers(3, heads, tokens, head_dims[0])
    keys = _numbers(4, kv_heads, columns, head_dims[0], seed=1)
    values = _numbers(4, kv_heads, columns, head_dims[1], seed=2)
    for window in (0, 20):
        native.use_instruction_set("plain")
        expected = _attend(queries, keys, values, *starts, window=window)
        for name in instruction_sets:
            native.use_instruction_set(name)
            got = _attend(queries, keys, values, *starts, window=window)
            assert np.abs(got - expected).max() < _ROUNDING, (name, window)


def test_attention_is_mlx_s() -> None:
    """Of a prompt and of a token behind it: mlx's own, within rounding."""
    keys, values = _numbers(1, 3, 200, 64, seed=1), _numbers(1, 3, 200, 64, seed=2)
    for tokens in (1, 200):
        queries = _numbers(1, 9, tokens, 64)
        mask = "causal" if tokens > 1 else None
        expected = mx.fast.scaled_dot_product_attention(
            queries, keys, values, scale=_SCALE, mask=mask
        )
        got = _attend(queries, keys, values, 200 - tokens)
        assert np.abs(got - np.array(expected.transpose(0, 2, 1, 3))).max() < _ROUNDING


@given(
    length=st.integers(1, 200),
    chunk=st.integers(1, 70),
    prefix=st.integers(0, 200),
    spare=st.integers(0, 70),
    others=st.integers(0, 3),
    threads=st.integers(1, 3),
    window=st.sampled_from([0, 0, 5, 90]),
)
def test_a_token_has_the_same_bits_in_every_company(  # noqa: PLR0917 - what may differ
    instruction_sets: list[str],
    length: int,
    chunk: int,
    prefix: int,
    spare: int,
    others: int,
    threads: int,
    window: int,
) -> None:
    """One by one, in chunks, beside other rows, in a wider array, behind a prefix that is held apart, on threads and on any instruction set."""
    prefix = min(prefix, length - 1)
    queries = _numbers(1, 6, length, 32)
    keys, values = _numbers(1, 2, length, 32, seed=1), _numbers(1, 2, length, 32, seed=2)
    native.set_thread_count(1)
    native.use_instruction_set("")
    alone = np.concatenate(
        [
            _attend(queries[:, :, at : at + 1], keys, values, at, window=window)
            for at in range(length)
        ],
        axis=1,
    )
    native.set_thread_count(threads)

    def among(array: mx.array, seed: int) -> mx.array:
        """The row as the last of several, in columns with others' numbers behind."""
        wide = mx.concatenate([array, _numbers(*array.shape[:2], spare, 32, seed=seed)], axis=2)
        return mx.concatenate(
            [*[_numbers(*wide.shape, seed=seed + at) for at in range(others)], wide]
        )

    for name in instruction_sets:
        native.use_instruction_set(name)
        for begin in range(prefix, length, chunk):
            asking = queries[:, :, begin : begin + chunk]
            batch = mx.concatenate(
                [_numbers(*asking.shape, seed=9 + at) for at in range(others)] + [asking]
            )
            starts = [*range(others), begin - prefix]
            shared = (keys[:, :, :prefix], values[:, :, :prefix]) if prefix else (None, None)
            own = among(keys[:, :, prefix:], 20), among(values[:, :, prefix:], 30)
            got = np.array(
                native.attend(batch, *own, _int32(*starts), *shared, scale=_SCALE, window=window)
            )
            assert np.array_equal(got[-1:], alone[:, begin : begin + chunk]), (name, begin)


def test_a_row_s_fault_stays_its_own() -> None:
    """A NaN in one row's keys, or behind its last column, reaches no other row and no earlier token."""
    queries, keys, values = (
        _numbers(2, 4, 8, 32),
        _numbers(2, 2, 40, 32, seed=1),
        _numbers(2, 2, 40, 32, seed=2),
    )
    expected = _attend(queries, keys, values, 10, 20)
    for array in (keys, values):
        array[0, :, 15:] = float("nan")
        array[1, :, 28:] = float("inf")
    got = _attend(queries, keys, values, 10, 20)
    assert np.array_equal(got[1], expected[1])
    assert np.isnan(got[0, 5:]).all()


def test_heads_may_lie_apart() -> None:
    """Queries and keys that are parts of larger arrays, in another order of axes, need no copy."""
    joined = _numbers(2, 5, 10, 64)
    keys, values = _numbers(2, 60, 2, 64, seed=1), _numbers(2, 60, 2, 64, seed=2)
    views = (
        joined[:, :, 2:6].transpose(0, 2, 1, 3),
        keys.transpose(0, 2, 1, 3)[:, :, 5:],
        values.transpose(0, 2, 1, 3)[:, :, 5:],
    )
    queries, keys, values = map(mx.contiguous, views)
    assert np.array_equal(_attend(*views, 3, 40), _attend(queries, keys, values, 3, 40))


def test_columns_are_written_where_rows_stand() -> None:
    """Of any dtype; behind the last column nothing is, and other rows and places keep theirs."""
    for dtype in (mx.float32, mx.bfloat16, mx.uint32):
        columns = (_numbers(3, 2, 9, 4) * 10).astype(dtype)
        tokens = (_numbers(2, 3, 2, 4, seed=1) * 10).astype(dtype).transpose(0, 2, 1, 3)
        got = native.written(columns + 0, tokens, _int32(2, 7))
        expected = columns + 0
        expected[0, :, 2:5] = tokens[0]
        expected[1, :, 7:] = tokens[1][:, :2]
        assert mx.array_equal(got, expected)


def test_writing_leaves_an_array_that_others_hold() -> None:
    """An array with other references is copied; one without is written in place, or memory would double."""
    columns = mx.zeros((4, 2, 1000, 64))
    mx.eval(columns)
    tokens = mx.ones((4, 2, 1, 64))
    held = native.written(columns, tokens, _int32(0, 0, 0, 0))
    mx.eval(held)
    assert not columns.any()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    for at in range(5):
        held = native.written(held, tokens, _int32(at, at, at, at))
        mx.eval(held)
    assert mx.get_peak_memory() - before < held.nbytes / 2
    assert held.sum() == 4 * 2 * 5 * 64


@pytest.mark.parametrize(
    "wrong",
    [
        {"queries": (2, 3, 1, 32)},
        {"queries": (2, 4, 1, 16)},
        {"queries": (2, 4, 1, 24), "keys": (2, 2, 9, 24)},
        {"keys": (1, 2, 9, 32)},
        {"values": (2, 1, 9, 32)},
        {"values": (2, 2, 8, 32)},
        {"values": (2, 2, 9)},
        {"starts": (3,)},
    ],
    ids=str,
)
def test_sizes_that_do_not_go_together_are_refused(wrong: dict[str, tuple[int, ...]]) -> None:
    """Before anything is computed."""
    shapes = {
        "queries": (2, 4, 1, 32),
        "keys": (2, 2, 9, 32),
        "values": (2, 2, 9, 32),
        "starts": (2,),
        **wrong,
    }
    arrays = [
        mx.zeros(shape, dtype=mx.int32 if name == "starts" else mx.float32)
        for name, shape in shapes.items()
    ]
    with pytest.raises(ValueError, match=r"are|have|there"):
        native.attend(*arrays, scale=1.0)


def test_starts_out_of_range_touch_nothing_else() -> None:
    """A start behind the columns sees all of them, and writes none; one before them is the first."""
    queries, keys, values = (
        _numbers(2, 4, 3, 32),
        _numbers(2, 2, 9, 32, seed=1),
        _numbers(2, 2, 9, 32, seed=2),
    )
    got = _attend(queries, keys, values, 1000, -5)
    assert np.array_equal(got, _attend(queries, keys, values, 9, 0))
    assert mx.array_equal(native.written(keys, values, _int32(1000, 9)), keys)
