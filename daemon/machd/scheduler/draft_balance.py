"""Balance of drafts: each row's acceptance, and the time that wrong drafts may cost.

Plain steps and right drafts earn time, wrong drafts spend it, and without any left there are no drafts. So a
proposer that is always wrong costs 2 % at most, whatever the acceptance that rows are thought to have.
"""

from __future__ import annotations

_FIRST_PASSES, _MAX_PASSES = 0.5, 2.0
"""Passes that wrong drafts may cost before any was right, and the most that right ones earn: what is promised beside the
share, and four times that. With 3 an always wrong proposer breaks the promise in simulation."""

_GROWTH = 0.01
"""Share of the plain time that wrong drafts may cost for good. The promise is twice that: the other half
is for losses that noise hides. In simulation 0.05 breaks it."""

_MAX_CHARGE = 1.5
"""Most that a step is charged, in its usual durations: a slow step is no draft's fault. Without it, simulated drafts
of which 60 % are right make a fifth fewer tokens where durations are off by a tenth and one in thirty by three times."""

_WEIGHT = 0.2
"""Weight of the newest step in the gain: that of the last ten counts for nine tenths."""


class Acceptance:
    """Recent acceptance of a row's draft tokens."""

    __slots__ = ("_hits", "_misses")

    _PRIOR = 0.6
    _VERDICT_DECAY = 0.75
    _PLAIN_DECAY = 0.98
    _MAX_HITS = 4.0  # of one long success, so that the failures after it show

    def __init__(self) -> None:
        """Begin without a history."""
        self._hits = self._misses = 0.0

    @property
    def rate(self) -> float:
        """Estimated probability that a draft token is right if those before it are."""
        return (self._hits + self._PRIOR) / (self._hits + self._misses + 1.0)

    def observe(self, drafted_tokens: int, accepted_tokens: int) -> None:
        """Take in one verification."""
        self.fade(self._VERDICT_DECAY)
        self._hits += min(float(accepted_tokens), self._MAX_HITS)
        self._misses += accepted_tokens < drafted_tokens

    def fade(self, decay: float = _PLAIN_DECAY) -> None:
        """Let the history count less; by default as a step without drafts does."""
        self._hits *= decay
        self._misses *= decay


class DraftBalance:
    """Time that wrong drafts may cost, in plain steps.

    Attributes:
        passes: What is left; below 0 after a slow step.
        batched_gain: Tokens a second of steps with drafts for several rows over those without, a
            moving average; None before one.
    """

    __slots__ = ("batched_gain", "passes")

    def __init__(self) -> None:
        """Begin with what a proposer without a history may cost."""
        self.passes = _FIRST_PASSES
        self.batched_gain: float | None = None

    def settle_plain(self) -> None:
        """Take in a step without tokens ahead."""
        self._earn(_GROWTH)

    def settle_drafts(
        self, rows: int, accepted_tokens: int, *, duration_passes: float, usual_passes: float
    ) -> None:
        """Take in a step with tokens ahead.

        Args:
            rows: Rows that decoded.
            accepted_tokens: Tokens that all of them got beside one each.
            duration_passes: Duration of the step.
            usual_passes: Duration that it was expected to have.
        """
        tokens = 1.0 + accepted_tokens / rows
        # The usual duration at least: else noise makes wrong drafts earn: 19 passes lost on a simulated CPU in place of 1.
        charged = min(max(duration_passes, usual_passes), _MAX_CHARGE * usual_passes)
        if rows > 1:
            gain = tokens / charged
            before = gain if self.batched_gain is None else self.batched_gain
            self.batched_gain = before + (gain - before) * _WEIGHT
        self._earn(tokens * (1.0 + _GROWTH) - charged)

    def _earn(self, passes: float) -> None:
        self.passes = max(-_MAX_PASSES, min(self.passes + passes, _MAX_PASSES))
