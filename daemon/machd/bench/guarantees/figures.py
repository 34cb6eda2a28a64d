"""The figures of ``machd bench --guarantees``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from msgspec import Struct

from machd.bench.goal import Goal, Verdict
from machd.bench.statistics import percentile


class GuaranteeFigures(Struct, frozen=True, kw_only=True):
    """One promise in seconds, over all tries. The worst try decides.

    Attributes:
        guarantee: Its name.
        goal_s: The most that a try may take.
        tries: How often it was measured; 0 if it could not be.
        p50_s: The median try.
        worst_s: The slowest try.
        reason: Why it could not be measured; null if it was.
    """

    guarantee: str
    goal_s: float
    tries: int
    p50_s: float | None
    worst_s: float | None
    verdict: Verdict
    reason: str | None

    @classmethod
    def of(
        cls, guarantee: str, goal_s: float, tries_s: Sequence[float], reason: str | None = None
    ) -> Self:
        """Sum up.

        Args:
            guarantee: Its name.
            goal_s: The most that a try may take.
            tries_s: What each try took; tries before an obstacle count for nothing.
            reason: The obstacle, if there was one.
        """
        ordered = [] if reason is not None else sorted(tries_s)
        worst_s = ordered[-1] if ordered else None
        return cls(
            guarantee=guarantee,
            goal_s=goal_s,
            tries=len(ordered),
            p50_s=percentile(ordered, 50) if ordered else None,
            worst_s=worst_s,
            verdict=Goal.at_most(guarantee, goal_s, worst_s, "s").verdict,
            reason=reason,
        )

    @property
    def as_goal(self) -> Goal:
        """The same as one of the run's goals."""
        return Goal.at_most(self.guarantee, self.goal_s, self.worst_s, "s")
