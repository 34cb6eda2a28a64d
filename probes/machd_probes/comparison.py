"""Comparison of a row in a batch with the same row alone, in figures.

The row in company is made to say the tokens that it said alone, so that every position can be
compared, also behind a place where the two would have parted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from machd.capabilities.evidence import Evidence
from machd.engine.protocol.step import SampledToken

_FLOORS = 8
"""Differences may be so many times the noise floor: a batch rounds in other places than a chunk."""

_SLACK = 5e-4
"""In nats. float32 rounding was measured at 5e-5 and less; the faults known are of 0.01 and more."""


def tolerated(noise_floor: float) -> float:
    """The difference of a log-probability, in nats, that rounding may explain."""
    return _FLOORS * noise_floor + _SLACK


def compared(
    alone: Sequence[SampledToken], together: Sequence[SampledToken], noise_floor: float
) -> Evidence:
    """Compare position by position; a token counts as another where its margin exceeds the floor.

    Args:
        alone: With the most likely tokens and their log-probabilities.
        together: The same, of the row in company.
        noise_floor: In nats.
    """
    if len(alone) != len(together):
        missing = abs(len(alone) - len(together))
        return Evidence(missing, math.inf, noise_floor, cases=1)
    mismatches = sum(
        _best(one) != _best(other) and margin(one) > tolerated(noise_floor)
        for one, other in zip(alone, together, strict=True)
    )
    return Evidence(mismatches, largest_difference(alone, together), noise_floor, cases=1)


def largest_difference(alone: Sequence[SampledToken], together: Sequence[SampledToken]) -> float:
    """The largest difference of a log-probability, in nats; infinite where one is NaN."""
    pairs = zip(alone, together, strict=True)
    return max((_difference(one, other) for one, other in pairs), default=0.0)


def margin(token: SampledToken) -> float:
    """By how much the most likely token beats the next, in nats."""
    best, second = token.top_logprobs[:2]
    return best.logprob - second.logprob


def _best(token: SampledToken) -> int:
    return token.top_logprobs[0].token_id


def _difference(one: SampledToken, other: SampledToken) -> float:
    others = {top.token_id: top.logprob for top in other.top_logprobs}
    # The least likely of those listed may be others; what is in neither list is not looked at.
    gaps = [
        abs(top.logprob - others[top.token_id])
        for top in one.top_logprobs
        if top.token_id in others
    ]
    if not gaps or any(math.isnan(gap) for gap in gaps):
        return math.inf
    return max(gaps)
