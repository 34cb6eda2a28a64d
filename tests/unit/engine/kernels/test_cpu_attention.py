"""Attention in blocks equals MLX's own attention."""

from __future__ import annotations

import math
from types import ModuleType

import mlx.core as mx
import pytest
from support.engines.cpu_layers import for_cpu_layers

from machd.engine.backend.native_kernels import native_kernels
from machd.engine.kernels import cpu_attention, native_attention
from machd.engine.kernels.cpu_attention import attend
from machd.engine.kv.layers.slab import SlabKv
from machd.engine.kv.row_positions import RowPositions
from machd.engine.kv.slab_layout import LengthClasses, OneSlab
from machd.engine.protocol.step import SharedPrefix

pytestmark = for_cpu_layers

_IMPLEMENTATIONS = (
    [cpu_attention] if native_kernels() is None else [cpu_attention, native_attention]
)

_implementations = pytest.mark.parametrize(
    "implementation", _IMPLEMENTATIONS, ids=lambda module: module.__name__.rpartition(".")[2]
)

_HEAD_DIM = 16
_SCALE = _HEAD_DIM**-0.5


def _tensors(
    rows: int, heads: int, kv_heads: int, tokens: int, width: int
) -> tuple[mx.array, mx.array, mx.array]:
    key = mx.random.key(rows + heads + tokens + width)
    shapes = [(rows, heads, tokens, _HEAD_DIM), *[(rows, kv_heads, width, _HEAD_DIM)] * 2]
    queries, keys, values = (
        mx.random.normal(shape, key=part)
        for shape, part in zip(shapes, mx.random.split(key, 3), strict=True)
    )
    return queries, keys, values


def _is_right(
    tensors: tuple[mx.array, mx.array, mx.array], mask: mx.array | str | None, scale: float
) -> bool:
    right = mx.fast.scaled_dot_product_attention(*tensors, scale=scale, mask=mask)
    every = [one.attend(*tensors, scale=scale, mask=mask) for one in _IMPLEMENTATIONS]
    return all(
        mixed.shape == right.shape and bool(mx.allclose(mixed, right, rtol=1e-5, atol=1e-5))
        for mixed in every
    )


_SHAPES = pytest.mark.parametrize(
    ("rows", "heads", "kv_heads", "tokens", "width"),
    [
        (1, 1, 1, 1, 5),  # left to MLX
        (64, 4, 2, 1, 100),
        (3, 6, 2, 50, 50),
        (1, 9, 3, 40, 300),
        (2, 4, 4, 257, 600),  # several blocks, the last one short
    ],
)
"""Steps and prompts, heads that share keys and heads that do not."""


@_SHAPES
@pytest.mark.parametrize("mask", [None, "causal"])
def test_attend_agrees_with_mlx(
    rows: int, heads: int, kv_heads: int, tokens: int, width: int, mask: str | None
) -> None:
    """Blocks agree with MLX for steps, prompts, and prompts that continue a context."""
    assert _is_right(_tensors(rows, heads, kv_heads, tokens, width), mask, _SCALE)


@_SHAPES
def test_attend_applies_boolean_masks(
    rows: int, heads: int, kv_heads: int, tokens: int, width: int
) -> None:
    """Masks by row and by token's window hide the same columns as in MLX."""
    ends = mx.arange(rows)[:, None, None, None] + width // 2
    own = ends + mx.arange(tokens)[:, None] - tokens // 2
    columns = mx.arange(width)
    mask = (columns <= own) & (columns > own - 70)
    assert _is_right(_tensors(rows, heads, kv_heads, tokens, width), mask, _SCALE)


def test_attend_does_not_depend_on_block_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """One token a block and all in one give the same numbers."""
    tensors = _tensors(4, 4, 2, 33, 64)
    whole = attend(*tensors, scale=_SCALE, mask="causal")
    monkeypatch.setattr(cpu_attention, "_BLOCK_SCORES", 1)
    for tokens in (1, 2, 7, 33):
        monkeypatch.setattr(cpu_attention, "_MIN_BLOCK_TOKENS", tokens)
        assert mx.allclose(attend(*tensors, scale=_SCALE, mask="causal"), whole, atol=1e-6)


def test_attend_does_not_overflow_when_scores_are_far_apart() -> None:
    """Scores of thousands give results as exact as their own last bits, thousandths."""
    tensors = _tensors(2, 4, 2, 80, 80)
    right = mx.fast.scaled_dot_product_attention(*tensors, scale=1000.0, mask="causal")
    assert mx.allclose(attend(*tensors, scale=1000.0, mask="causal"), right, atol=2e-2)


def test_masked_columns_do_not_contribute() -> None:
    """Large finite numbers behind a row's end change nothing."""
    queries, keys, values = _tensors(64, 4, 2, 1, 100)
    mask = mx.arange(100) < 60
    mask = mx.broadcast_to(mask, (64, 1, 1, 100))
    large_keys = mx.where(mx.arange(100)[:, None] < 60, keys, 1e6)
    large_values = mx.where(mx.arange(100)[:, None] < 60, values, 1e6)
    usual = attend(queries, keys, values, scale=_SCALE, mask=mask)
    assert mx.array_equal(attend(queries, large_keys, large_values, scale=_SCALE, mask=mask), usual)


def test_nan_key_reaches_its_own_row_only() -> None:
    """A NaN shows in its own row's result, where it is detected, and in no other row's."""
    queries, keys, values = _tensors(64, 4, 2, 1, 100)
    keys[3, :, 7] = math.nan
    mixed = attend(queries, keys, values, scale=_SCALE, mask=None)
    is_bad = mx.isnan(mixed).all(axis=(1, 2, 3))
    assert is_bad.tolist() == [row == 3 for row in range(64)]
    assert not mx.isnan(mixed[mx.array([row for row in range(64) if row != 3])]).any()


@_implementations
@pytest.mark.parametrize("tokens", [1, 3])
def test_attend_rows_does_not_depend_on_slabs(tokens: int, implementation: ModuleType) -> None:
    """Each row gets the same result whether rows lie in one slab or in several, in whatever order."""
    lengths = (300, 7, 8, 500, 119, 255, 1, 900)
    mixed = []
    for rule, slabs in ((OneSlab(len(lengths)), 1), (LengthClasses(), 4)):
        positions = RowPositions(rule)
        cache = SlabKv(positions)
        for row, length in enumerate(lengths):
            positions.append(length, 1000)
            _, keys, values = _tensors(1, 4, 2, 1, length)
            cache.place(row, [keys, values])
        positions.begin_pass([tokens] * len(lengths))
        queries, keys, values = _tensors(len(lengths), 4, 2, tokens, tokens)
        mixed.append(implementation.attend_rows(queries, keys, values, cache, scale=_SCALE))
        assert len(positions.layout) == slabs
    assert mx.allclose(mixed[0], mixed[1], atol=1e-5)


@_implementations
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("lengths", [(40, 300, 33, 310, 32), (40, 40, 40, 40, 40)])
def test_attend_rows_does_not_depend_on_what_rows_share(
    lengths: tuple[int, ...], tokens: int, implementation: ModuleType
) -> None:
    """Rows that read 32 positions in one place get the same result as with columns of their own for all."""
    prefix = SharedPrefix(1, 32)
    _, *begun = _tensors(1, 4, 2, 1, prefix.tokens)
    mixed = []
    for sharing in ((False,) * 5, (True,) * 5, (True, False, True, True, False)):
        positions = RowPositions(LengthClasses())
        cache = SlabKv(positions)
        cache.hold_prefix(prefix.number, begun)
        for row, (length, shares) in enumerate(zip(lengths, sharing, strict=True)):
            positions.append(length, 1000, prefix if shares else None)
            _, *going_on = _tensors(1, 4, 2, 1, length + row)
            whole = [
                mx.concatenate([one, other], axis=2)[:, :, :length]
                for one, other in zip(begun, going_on, strict=True)
            ]
            cache.place(row, [one[:, :, prefix.tokens * shares :] for one in whole])
        positions.begin_pass([tokens] * len(lengths))
        assert cache.offset.tolist() == list(lengths), "positions count from the text's beginning"
        queries, keys, values = _tensors(len(lengths), 4, 2, tokens, tokens)
        mixed.append(implementation.attend_rows(queries, keys, values, cache, scale=_SCALE))
    assert mx.allclose(mixed[0], mixed[1], atol=1e-5)
    assert mx.allclose(mixed[0], mixed[2], atol=1e-5)
