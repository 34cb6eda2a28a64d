"""Filters of a distribution: temperature, then top-k, top-p and min-p."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from machd.request import SamplingParams

_GREEDY_TEMPERATURE = 1e-6
"""At and below this a distribution has all its mass on one token, and dividing by it overflows."""


@dataclass(slots=True)
class Filters:
    """Parameters of the rows that sample, as float32 [rows, 1] columns."""

    rows: mx.array
    temperature: mx.array
    top_p: mx.array | None
    top_k: mx.array | None
    max_top_k: int
    min_p: mx.array | None
    row_list: list[int] = field(default_factory=list)


def filters_of(rows: Sequence[SamplingParams]) -> Filters | None:
    """Columns for the rows that are not greedy; None when every row is greedy."""
    sampled = [i for i, row in enumerate(rows) if row.temperature > _GREEDY_TEMPERATURE]
    if not sampled:
        return None
    params = [rows[i] for i in sampled]
    top_k = [one.top_k for one in params]
    # 0 means no limit; the widest real limit bounds the partition, unlimited rows skip it.
    max_top_k = max(top_k)
    return Filters(
        rows=mx.array(sampled, dtype=mx.int32),
        temperature=column([one.temperature for one in params]),
        top_p=column([one.top_p for one in params]) if min(o.top_p for o in params) < 1 else None,
        top_k=mx.array(top_k, dtype=mx.int32)[:, None] if max_top_k > 0 else None,
        max_top_k=max_top_k,
        min_p=column([one.min_p for one in params]) if max(o.min_p for o in params) > 0 else None,
        row_list=sampled,
    )


def keep_top_k(scaled: mx.array, top_k: mx.array, max_top_k: int) -> mx.array:
    """Set all but each row's ``top_k`` largest to -inf; ties at the edge stay in.

    Args:
        scaled: float32 [rows, vocabulary].
        top_k: int32 [rows, 1]; 0 leaves a row as it is.
        max_top_k: The largest of ``top_k``.
    """
    count = min(max_top_k, scaled.shape[-1])
    largest = -mx.sort(mx.partition(-scaled, kth=count - 1, axis=-1)[:, :count], axis=-1)
    edge_index = mx.clip(top_k - 1, 0, count - 1)
    edge = mx.take_along_axis(largest, edge_index, axis=-1)
    return mx.where((top_k == 0) | (scaled >= edge), scaled, -mx.inf)


def keep_top_p(weights: mx.array, top_p: mx.array) -> mx.array:
    """Zero all but the smallest set of largest weights that reaches ``top_p`` of the row's sum.

    Args:
        weights: float32 [rows, vocabulary], not normalised.
        top_p: float32 [rows, 1].
    """
    ordered = -mx.sort(-weights, axis=-1)
    cumulative = mx.cumsum(ordered, axis=-1)
    # A weight stays if those in front of it have not reached the target yet.
    stays = (cumulative - ordered) < top_p * cumulative[:, -1:]
    edge_index = mx.maximum(mx.sum(stays, axis=-1, keepdims=True) - 1, 0)
    edge = mx.take_along_axis(ordered, edge_index, axis=-1)
    return mx.where((top_p >= 1.0) | (weights >= edge), weights, 0.0)


def column(values: Sequence[float]) -> mx.array:
    """Return one number for each row, float32 [rows, 1]."""
    return mx.array(list(values), dtype=mx.float32)[:, None]
