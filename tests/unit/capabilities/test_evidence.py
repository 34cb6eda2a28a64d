"""Evidence can be written down, read back and added up."""

from __future__ import annotations

import math

import msgspec
import pytest

from machd.capabilities.evidence import FURTHEST_NATS, NO_EVIDENCE, Evidence, Outcome, ProbeResult


@pytest.mark.parametrize("difference", [0.0, 3.5e-6, 12.0, math.inf, math.nan])
def test_figures_survive_json(difference: float) -> None:
    """Whatever was measured is the same figure behind a cache file, a log line and a wire."""
    result = ProbeResult("batch_parity", Outcome.FAILED, "", Evidence(1, difference, difference, 2))

    again = msgspec.json.decode(msgspec.json.encode(result), type=ProbeResult)

    assert again == result
    assert again.evidence.max_logprob_diff == min(difference, FURTHEST_NATS) or math.isnan(
        difference
    )
    assert again.evidence.max_logprob_diff <= FURTHEST_NATS


def test_a_nan_difference_counts_as_infinite() -> None:
    """A NaN difference never counts as a small one."""
    assert Evidence(0, math.nan, 0.0, 1).max_logprob_diff == FURTHEST_NATS


def test_together_counts_add_up_and_the_largest_difference_stays() -> None:
    """Many comparisons are as good as the worst of them."""
    parts = [Evidence(0, 1e-6, 2e-6, 3), Evidence(2, 0.5, 1e-6, 4), NO_EVIDENCE]

    assert Evidence.together(parts) == Evidence(2, 0.5, 2e-6, 7)
    assert Evidence.together([]) == NO_EVIDENCE
