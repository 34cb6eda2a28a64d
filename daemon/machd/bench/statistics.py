"""Percentiles, as numpy and every other benchmark of servers compute them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Self

from msgspec import Struct


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The value below which ``percent`` of a sample lies, linear between the two nearest ranks.

    Args:
        ordered: The sample, ascending; at least one value.
        percent: From 0 to 100.
    """
    rank = (len(ordered) - 1) * percent / 100.0
    below = math.floor(rank)
    above = math.ceil(rank)
    return ordered[below] + (ordered[above] - ordered[below]) * (rank - below)


class Distribution(Struct, frozen=True, kw_only=True):
    """What is told of a sample of seconds."""

    count: int
    mean_s: float
    p50_s: float
    p90_s: float
    p99_s: float

    @classmethod
    def of_some(cls, sample_s: Iterable[float]) -> Self:
        """Sum up a sample of at least one value."""
        found = cls.of(sample_s)
        assert found is not None, "a sample of at least one value"
        return found

    @classmethod
    def of(cls, sample_s: Iterable[float]) -> Self | None:
        """Its distribution; None for an empty sample, such as the gaps of one-token answers."""
        ordered = sorted(sample_s)
        if not ordered:
            return None
        return cls(
            count=len(ordered),
            mean_s=math.fsum(ordered) / len(ordered),
            p50_s=percentile(ordered, 50),
            p90_s=percentile(ordered, 90),
            p99_s=percentile(ordered, 99),
        )
