"""Tokens that a grammar leaves no choice about: how many of them a pass takes beside the sampled ones."""

from __future__ import annotations

from collections.abc import Sequence

from machd.engine.step.sampling import RowSampling

_PASS_TOKENS = 20
"""What a pass costs before its first token, in tokens of one row: 52 ms against 2.6 ms on the CPU
(docs/internals/performance.md). Elsewhere it is more, and more tokens would be worth while."""

_MAX_FORCED_TOKENS = 16

_MIN_GAIN = 1.25
"""By how much forced tokens have to pay in theory. A pass of several tokens masks its attention and
computes all their logits, which the reckoning leaves out: at 16 rows what seemed to gain 5 % lost 5."""

_MAX_STRETCH = 2.0
"""How much longer forced tokens of one row may make a pass that others wait for."""


def worthwhile_tokens(waiting: Sequence[int]) -> int:
    """How many tokens of each row the next pass takes, so that it makes the most in its time.

    Rows are padded to the longest, so one row's forced tokens cost as much in every row.

    Args:
        waiting: Forced tokens of each row, besides the one that it starts from.
    """
    rows = len(waiting)
    best, best_rate = 1, _MIN_GAIN * rows / (_PASS_TOKENS + rows)
    for tokens in range(2, 2 + min(max(waiting), _MAX_FORCED_TOKENS)):
        cost = _PASS_TOKENS + rows * tokens
        if rows > 1 and cost > _MAX_STRETCH * (_PASS_TOKENS + rows):
            break
        rate = (rows + sum(min(one, tokens - 1) for one in waiting)) / cost
        if rate > best_rate:
            best, best_rate = tokens, rate
    return best


def forced_tokens(sampling: RowSampling, max_tokens: int) -> int:
    """Tokens that a row may take without sampling; none where each has to be looked at.

    Args:
        sampling: The row's.
        max_tokens: That its completion may have.
    """
    if sampling.matcher is None or sampling.params.top_logprobs is not None:
        return 0
    return min(len(sampling.matcher.forced), max_tokens - sampling.position)
