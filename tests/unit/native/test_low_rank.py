"""What adapters add to products: each row with its own, and its bits are its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

native = pytest.importorskip("machd_native", reason="make setup has found no compiler")

Piece = tuple[int, mx.array, mx.array, mx.array | None, mx.array | None]
"""Arguments of ``LowRank.Piece``."""

_ROUNDING = 3e-6


def _numbers(*shape: int, seed: int = 0) -> mx.array:
    return mx.array(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


def _int32(*numbers: int) -> mx.array:
    return mx.array(list(numbers), dtype=mx.int32)


def _low_rank(pieces: Sequence[tuple[Any, ...]]) -> Any:
    return native.LowRank([native.LowRank.Piece(*one) for one in pieces])


def _pieces(
    inputs: int,
    parts: Sequence[tuple[int, int, int]],
    seed: int = 0,
    dtype: mx.Dtype = mx.float32,
    *,
    has_magnitudes: bool = False,
) -> list[Piece]:
    """Make pieces from (first output, outputs, rank), of numbers that a dtype has; ratios are float32."""

    def numbers(*shape: int, seed: int) -> mx.array:
        return _numbers(*shape, seed=seed).astype(dtype).astype(mx.float32)

    def factors(outputs: int, seed: int) -> mx.array | None:
        return _numbers(outputs, seed=seed) if has_magnitudes else None

    return [
        (
            first,
            numbers(rank, inputs, seed=seed + at),
            numbers(outputs, rank, seed=50 + seed + at),
            factors(outputs, 100 + seed + at),
            factors(outputs, 150 + seed + at),
        )
        for at, (first, outputs, rank) in enumerate(parts)
    ]


def _expected(
    y: mx.array, x: mx.array, index: mx.array, adapters: Sequence[Sequence[Piece]]
) -> np.ndarray[Any, Any]:
    result, rows = np.array(y, np.float64), np.array(x, np.float64)
    for row, number in enumerate(np.array(index).tolist()):
        for first, a, b, ratios, offsets in adapters[number - 1] if number else ():
            low = np.array(a, np.float64) @ rows[row]
            own = result[row, first : first + b.shape[0]]
            if ratios is not None:
                own *= np.array(ratios, np.float64)
            if offsets is not None:
                own += np.array(offsets, np.float64)
            own += np.array(b, np.float64) @ low
    return result


@given(
    inputs=st.sampled_from([1, 16, 50, 192]),
    parts=st.sampled_from(
        [
            [(0, 96, 16)],
            [(5, 1, 1)],
            [(0, 70, 7), (70, 26, 3)],
            [(0, 40, 64), (40, 23, 5), (63, 33, 33)],
            [(50, 40, 8)],
        ]
    ),
    numbers=st.lists(st.integers(0, 3), min_size=1, max_size=40),
    threads=st.integers(1, 3),
    is_held=st.booleans(),
    has_magnitudes=st.booleans(),
    dtype=st.sampled_from([mx.float32, mx.float16]),
)
def test_each_row_gets_what_its_adapter_adds(  # noqa: PLR0917 - what may differ
    instruction_sets: list[str],
    inputs: int,
    parts: list[tuple[int, int, int]],
    numbers: list[int],
    threads: int,
    is_held: bool,  # noqa: FBT001 - drawn
    has_magnitudes: bool,  # noqa: FBT001 - drawn
    dtype: mx.Dtype,
) -> None:
    """Any ranks, pieces, magnitudes, order and company, on each instruction set as in the plain loops; a row without an adapter keeps its bits, and what others hold stays as it is."""
    native.set_thread_count(threads)
    pieces = [
        _pieces(inputs, parts, 0, dtype),
        _pieces(inputs, [(3, 90, 12)], 7, dtype, has_magnitudes=True),
        _pieces(inputs, parts, 9, dtype, has_magnitudes=has_magnitudes),
    ]
    adapters = [_low_rank(one) for one in pieces]
    rows, index = len(numbers), _int32(*numbers)
    x, y = _numbers(rows, inputs, seed=1), _numbers(rows, 96, seed=2)
    y[:, ::5] = -0.0  # which a sum with zero would change
    expected = _expected(y, x, index, pieces)
    results = []
    for name in ("plain", *instruction_sets):
        native.use_instruction_set(name)
        own = mx.array(y)
        mx.eval(own)
        held = own if is_held else None
        got = native.add_low_rank(own, x, index, adapters)
        del own
        mx.eval(got)
        assert np.abs(np.array(got) - expected).max() <= _ROUNDING * np.abs(expected).max(), name
        assert held is None or mx.array_equal(held, y)
        plain_rows = [row for row, number in enumerate(numbers) if number == 0]
        for row in plain_rows:
            assert np.array(got[row]).tobytes() == np.array(y[row]).tobytes()
        results.append(got)
    assert all(mx.array_equal(one, results[1]) for one in results[1:])


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16], ids=str)
@pytest.mark.parametrize("rank", [1, 3, 16, 33, 64])
def test_a_row_s_bits_are_the_same_in_any_company(
    instruction_sets: list[str],
    rank: int,
    dtype: mx.Dtype,
) -> None:
    """Alone, among rows of other adapters, as one of a long prompt, and with any number of threads."""
    pieces = [
        _pieces(192, [(0, 64, rank), (64, 75, rank)], seed, dtype, has_magnitudes=seed == 20)
        for seed in (0, 20, 40)
    ]
    adapters = [_low_rank(one) for one in pieces]
    x, y = _numbers(300, 192, seed=1), _numbers(300, 139, seed=2)
    mixed = mx.arange(300, dtype=mx.int32) * 7 % 4
    for name in ("plain", *instruction_sets):
        native.use_instruction_set(name)
        prompts = [
            native.add_low_rank(y, x, mx.full((300,), number, mx.int32), adapters)
            for number in range(4)
        ]
        mx.eval(prompts)
        for threads in (1, 2):
            native.set_thread_count(threads)
            got = native.add_low_rank(y, x, mixed, adapters)
            for row in (*range(9), 17, 150, 298, 299):
                number = int(mixed[row])
                assert mx.array_equal(got[row], prompts[number][row]), (name, row)
                one = slice(row, row + 1)
                alone = native.add_low_rank(y[one], x[one], mixed[one], adapters)
                assert mx.array_equal(alone[0], got[row]), (name, row)


@pytest.mark.parametrize("size", [1e-12, 1e-4, 1.0, 1e6])
def test_numbers_that_have_few_digits_take_half_the_memory(
    instruction_sets: list[str], size: float
) -> None:
    """Whatever their size, those beyond float16's own range, too; rows have the bits that they have in float32, which one number with more digits asks for."""
    ((_, a, b, *_),) = _pieces(64, [(0, 50, 8)], dtype=mx.float16)
    power = 2.0 ** round(np.log2(size))
    own = (0, a * power, b * power)
    long = mx.concatenate([own[2], mx.full((1, 8), 1 / 3)])
    x, y = _numbers(4, 64, seed=1), mx.zeros((4, 51))
    half, whole = _low_rank([own]), _low_rank([(0, own[1], long)])
    assert half.nbytes * 2 == whole.nbytes
    for name in (*instruction_sets, "plain"):
        native.use_instruction_set(name)
        got, other = (
            native.add_low_rank(y, x, _int32(1, 1, 1, 1), [one])[:, :50] for one in (half, whole)
        )
        assert mx.abs(got).max() > 0
        assert mx.array_equal(got, other)
    nothing = _low_rank([(0, a * 0, b)])
    assert mx.array_equal(native.add_low_rank(y, x, _int32(1, 1, 1, 1), [nothing]), y)


def test_pieces_have_the_bits_that_they_have_alone() -> None:
    """Merged layers give what each of them gives by itself."""
    pieces = _pieces(192, [(0, 64, 8), (64, 75, 5)], has_magnitudes=True)
    x, y, index = _numbers(5, 192, seed=1), _numbers(5, 139, seed=2), _int32(1, 1, 0, 1, 1)
    merged = native.add_low_rank(y, x, index, [_low_rank(pieces)])
    for first, a, b, *factors in pieces:
        own = slice(first, first + b.shape[0])
        alone = native.add_low_rank(y[:, own], x, index, [_low_rank([(0, a, b, *factors)])])
        assert mx.array_equal(alone, merged[:, own])


def test_an_index_that_nothing_has_gives_no_base_row() -> None:
    """Such a row is NaN, and its neighbours are theirs."""
    x, y = _numbers(2, 2, 16), _numbers(2, 2, 40)
    adapters = [_low_rank(_pieces(16, [(0, 40, 2)]))]
    got = native.add_low_rank(y, x, _int32(2, 0, 1, -1), adapters).reshape(4, 40)
    assert mx.isnan(got[0]).all()
    assert mx.isnan(got[3]).all()
    assert mx.array_equal(got[1], y[0, 1])
    alone = native.add_low_rank(y[1, :1], x[1, :1], _int32(1), adapters)
    assert mx.array_equal(got[2], alone[0])


def test_results_are_taken_over() -> None:
    """A product that nobody else holds is not copied, and rows that lie apart are brought together."""
    x, index = mx.swapaxes(_numbers(16, 4000), 0, 1), mx.ones((4000,), mx.int32)
    adapters = [_low_rank(_pieces(16, [(0, 900, 1)]))]
    y = mx.zeros((4000, 900))
    mx.eval(x, y, index)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    got = native.add_low_rank(y, x, index, adapters)
    del y
    mx.eval(got)
    assert mx.get_peak_memory() - before < got.nbytes / 2
    again = native.add_low_rank(mx.zeros((4000, 900)), mx.contiguous(x), index, adapters)
    assert mx.array_equal(got, again)


def test_an_adapter_counts_its_bytes_and_lives_as_long_as_it_is_used() -> None:
    """What was asked for keeps it until it is computed."""
    adapter = _low_rank(_pieces(192, [(0, 33, 4)], has_magnitudes=True))
    assert adapter.nbytes == 4 * (192 * 4 + 64 * 4 + 2 * 33)
    x, y = _numbers(3, 192), _numbers(3, 33)
    expected = native.add_low_rank(y, x, _int32(1, 1, 1), [adapter])
    mx.eval(expected)
    waiting = native.add_low_rank(y, x, _int32(1, 1, 1), [adapter])
    del adapter
    assert mx.array_equal(waiting, expected)


def test_sizes_that_do_not_go_together_are_refused() -> None:
    """Before anything is computed."""
    a, b, x, y, one = (
        _numbers(2, 16),
        _numbers(40, 2),
        _numbers(3, 16),
        _numbers(3, 40),
        _int32(1, 1, 1),
    )
    adapters = [_low_rank([(0, a, b)])]
    wrongs: list[Callable[[], object]] = [
        lambda: _low_rank([]),
        lambda: _low_rank([(0, a, b.T)]),
        lambda: _low_rank([(0, a.astype(mx.float16), b)]),
        lambda: _low_rank([(-1, a, b)]),
        lambda: _low_rank([(0, a, b), (40, a[:, :8], b)]),
        lambda: _low_rank([(0, a[:0], b[:, :0])]),
        lambda: _low_rank([(0, a, b, b[:39, 0])]),
        lambda: _low_rank([(0, a, b, None, b)]),
        lambda: _low_rank([(0, a, b, b[:, 0].astype(mx.float16))]),
        lambda: native.add_low_rank(y, x[:2], one, adapters),
        lambda: native.add_low_rank(y, x[:, :15], one, adapters),
        lambda: native.add_low_rank(y[:, :39], x, one, adapters),
        lambda: native.add_low_rank(y, x, one[:2], adapters),
        lambda: native.add_low_rank(y, x, one.astype(mx.uint32), adapters),
        lambda: native.add_low_rank(y.astype(mx.float16), x, one, adapters),
    ]
    for wrong in wrongs:
        with pytest.raises(ValueError, match=r"are|has"):
            wrong()
