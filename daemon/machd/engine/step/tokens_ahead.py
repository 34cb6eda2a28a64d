"""Choice of the number of tokens ahead that a decode pass computes for each row.

A pass over more tokens of each row takes longer and may yield more tokens. The plan says how much
longer (:class:`~machd.engine.protocol.step.SpanCost`); this module weighs that against the tokens
expected. It knows neither a clock nor a model: one plan gives one choice, wherever it is run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from machd.engine.protocol.step import SpanCost

MAX_FORCED_TOKENS = 16
"""Forced tokens in one pass: a longer run is spread over several."""

_MAX_STRETCH = 2.0
"""Longest a pass that other rows wait for may last, in passes over one token."""


@dataclass(frozen=True, slots=True)
class Offer:
    """The tokens ahead that one row could take.

    Attributes:
        forced_tokens: Dictated by the row's grammar; always accepted.
        draft_tokens: Proposed after them.
        acceptance: Probability that a draft token is right if those before it are.
    """

    forced_tokens: int
    draft_tokens: int
    acceptance: float

    def expected_tokens(self, ahead_tokens: int) -> float:
        """Tokens expected to be accepted of the first ``ahead_tokens``."""
        forced = min(self.forced_tokens, ahead_tokens)
        drafts = min(self.draft_tokens, ahead_tokens - forced)
        return forced + sum(self.acceptance**place for place in range(1, drafts + 1))


def worthwhile_tokens(offers: Sequence[Offer], cost: SpanCost) -> int:
    """Choose how many tokens ahead make the most tokens a second; 0 where none gain enough.

    Rows are padded to the longest, so every row pays for each token ahead of one row. A gain that other
    rows wait for has to reach ``cost.least_batched_gain``. The pass may lose at most ``cost.max_lost_passes`` if
    every draft is wrong.
    """
    rows = len(offers)
    best, best_gain = 0, 1.0
    most = max((one.forced_tokens + one.draft_tokens for one in offers), default=0)
    for ahead in range(1, most + 1):
        length = 1.0 + cost.token_cost * ahead  # in passes over one token
        if rows > 1 and length > _MAX_STRETCH:
            break
        certain = sum(min(one.forced_tokens, ahead) for one in offers) / rows  # never lost
        if length - 1.0 - certain > cost.max_lost_passes:
            continue
        gain = (1.0 + sum(one.expected_tokens(ahead) for one in offers) / rows) / length
        least = cost.least_batched_gain if rows > 1 and length > 1.0 else 1.0
        if gain > max(best_gain, least):
            best, best_gain = ahead, gain
    return best
