"""Percentiles and distributions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from machd.bench.statistics import Distribution, percentile

samples = st.lists(st.floats(0, 1e6), min_size=1, max_size=50)


@given(samples, st.floats(0, 100))
def test_a_percentile_is_what_numpy_says(sample: list[float], percent: float) -> None:
    """The linear interpolation is numpy's default, so that reports can be compared."""
    expected = float(np.percentile(np.array(sample), percent))

    assert percentile(sorted(sample), percent) == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_a_distribution_sums_up_a_sample_in_any_order() -> None:
    """Count, mean and percentiles are those of the sample, sorted or not."""
    distribution = Distribution.of([3.0, 1.0, 2.0])

    assert distribution is not None
    assert (distribution.count, distribution.mean_s, distribution.p50_s) == (3, 2.0, 2.0)
    assert distribution.p90_s == pytest.approx(2.8)
    assert distribution.p99_s == pytest.approx(2.98)


def test_an_empty_sample_has_no_distribution() -> None:
    """Answers of one token have no gaps, and that is no error."""
    assert Distribution.of([]) is None
