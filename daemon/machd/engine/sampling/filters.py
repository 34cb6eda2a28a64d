"""Filters of a distribution: temperature, then top-k, top-p and min-p."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from machd.request.generation import SamplingParams

_GREEDY_TEMPERATURE = 1e-6
"""At and below this a distribution has all its mass on one token, and dividing by it overflows."""


@dataclass(frozen=True, slots=True)
class Filters:
    """Filters of the batch rows that sample, as [sampled rows, 1] columns; None where unused."""

    rows: list[int]
    temperature: mx.array
    top_k: mx.array | None
    max_top_k: int
    top_p: mx.array | None
    min_p: mx.array | None

    def scaled(self, logits: mx.array) -> mx.array:
        """Divide logits [sampled rows, vocabulary] by the temperature; -inf for tokens left out, float32.

        A row with a NaN may come out with a NaN or without any token.
        """
        scaled = logits.astype(mx.float32) / self.temperature
        if self.top_k is not None:
            scaled = _keep_top_k(scaled, self.top_k, self.max_top_k)
        if self.top_p is not None:
            scaled = _keep_top_p(scaled, self.top_p)
        if self.min_p is not None:
            edge = mx.max(scaled, axis=-1, keepdims=True) + mx.log(self.min_p)
            scaled = mx.where(scaled >= edge, scaled, -mx.inf)
        return scaled


def filters_of(rows: Sequence[SamplingParams]) -> Filters | None:
    """Return the filters of the rows that are not greedy; None when every row is greedy."""
    sampled = [i for i, row in enumerate(rows) if row.temperature > _GREEDY_TEMPERATURE]
    if not sampled:
        return None
    params = [rows[i] for i in sampled]
    top_k, top_p, min_p = zip(*((one.top_k, one.top_p, one.min_p) for one in params), strict=True)
    return Filters(
        rows=sampled,
        temperature=_column([one.temperature for one in params]),
        top_k=mx.array(top_k, dtype=mx.int32)[:, None] if max(top_k) > 0 else None,
        max_top_k=max(top_k),
        top_p=_column(top_p) if min(top_p) < 1 else None,
        min_p=_column(min_p) if max(min_p) > 0 else None,
    )


def _keep_top_k(scaled: mx.array, top_k: mx.array, max_top_k: int) -> mx.array:
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


def _keep_top_p(scaled: mx.array, top_p: mx.array) -> mx.array:
    """Set all but the smallest set of likeliest tokens that reaches ``top_p`` of the row's mass to -inf.

    Args:
        scaled: float32 [rows, vocabulary].
        top_p: float32 [rows, 1].
    """
    weights = mx.exp(scaled - mx.max(scaled, axis=-1, keepdims=True))
    ordered = -mx.sort(-weights, axis=-1)
    cumulative = mx.cumsum(ordered, axis=-1)
    # A weight stays if those in front of it have not reached the target yet.
    stays = (cumulative - ordered) < top_p * cumulative[:, -1:]
    edge_index = mx.maximum(mx.sum(stays, axis=-1, keepdims=True) - 1, 0)
    edge = mx.take_along_axis(ordered, edge_index, axis=-1)
    return mx.where((top_p >= 1.0) | (weights >= edge), scaled, -mx.inf)


def _column(values: Sequence[float]) -> mx.array:
    return mx.array(list(values), dtype=mx.float32)[:, None]
