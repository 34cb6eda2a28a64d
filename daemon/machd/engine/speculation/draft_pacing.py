"""How many guesses are worth their time: never more than what pays, and zero where nothing does.

A pass over one token and a few guesses takes longer than one over the token alone. Guesses pay if
what is accepted of them saves more passes than that. How often they are accepted is told by the
row's own recent history; what passes and guesses cost is measured while the daemon runs.

The promise is that decoding with guesses is never slower than decoding without by more than 2 %: a
row has an allowance of time that it may lose. Accepted guesses add to it, wrong ones take from it,
and who has spent it decodes plainly until it has grown again with the time that plain passes take.
What one row's guesses cost, every row of the pass pays, and each must be able to.
"""

from __future__ import annotations

from collections.abc import Sequence

from machd.engine.protocol.step import LEAST_BATCHED_GAIN
from machd.engine.speculation.pass_costs import PassCosts, RecentTimes

_FIRST_ALLOWANCE_PASSES = 0.5
_MAX_ALLOWANCE_PASSES = 2.0
"""An old success pays for two passes in vain, and not for a long slow tail."""

_GROWTH = 0.01
"""How much of its plain time a row may lose. The promise is twice that: the other half is for what
noise hides."""

_MAX_HICCUP, _MIN_HICCUP = 1.5, 0.75
"""What a pass of a well known kind is charged with at the most and the least, in its usual time."""

_MAX_GUESSING_HICCUP = 4.0

_NEGLIGIBLE = 0.01
"""Guesses that take so little of a pass may be asked for in plenty: what is too many is left out."""

_GUESSING_FADING = 0.98
"""How much the cost of a guess is forgotten with each pass without one."""

_FORGIVEN_PASSES = 400
"""After so many passes in which nobody guessed a dear guess is tried again."""

_PRIOR_SURE, _PRIOR_HESITANT = 0.7, 0.4
"""How often a guess is right before anything is known: of one that is as long as it was asked for, and of
one that its proposer cut short. Measured with prompt lookup: 0.9 and more, and a third in free text."""

_VERDICT_DECAY = 0.75
_MAX_HITS = 4.0
"""What one long success counts at the most, so that the next failures are seen."""

_PLAIN_DECAY = 0.98
"""How much of its history a row forgets with each pass without guesses: texts change."""

_PATIENCE_PASSES = ((1.15, 3), (1.5, 8), (float("inf"), 64))
"""After so many passes with guesses comes one without, to measure what it costs now, by how many times as
fast as that the guesses seem. A stale measure matters where they gain little, and there the plain pass
costs little."""


class _Acceptance:
    """How often guesses of one kind are right, lately."""

    __slots__ = ("hits", "misses", "prior")

    def __init__(self, prior: float) -> None:
        self.prior = prior
        self.hits = 0.0
        self.misses = 0.0

    @property
    def rate(self) -> float:
        return (self.hits + self.prior) / (self.hits + self.misses + 1.0)

    def see(self, drafted_tokens: int, accepted_tokens: int) -> None:
        self.fade(_VERDICT_DECAY)
        self.hits += min(float(accepted_tokens), _MAX_HITS)
        self.misses += accepted_tokens < drafted_tokens

    def fade(self, decay: float) -> None:
        self.hits *= decay
        self.misses *= decay


class RowPacing:
    """One row's history of guesses, and the time that it may lose with more of them.

    Attributes:
        allowance_s: What may be lost now; None until it is known what a pass takes.
        wanted_tokens: Guesses that it was asked for last.
        is_sure: Whether its last guess was as long as that. A proposer that cuts it short knows why.
        drafted_tokens: Guesses in the pass under way.
        accepted_tokens: Of these.
    """

    __slots__ = (
        "_hesitant",
        "_sure",
        "accepted_tokens",
        "allowance_s",
        "drafted_tokens",
        "is_sure",
        "wanted_tokens",
    )

    def __init__(self, allowance_s: float | None) -> None:
        """Begin without a history."""
        self.allowance_s = allowance_s
        self.wanted_tokens = 0
        self.is_sure = True
        self.drafted_tokens = 0
        self.accepted_tokens = 0
        self._sure = _Acceptance(_PRIOR_SURE)
        self._hesitant = _Acceptance(_PRIOR_HESITANT)

    @property
    def acceptance(self) -> float:
        """How often a token of a guess like the last one is right, if those before it are."""
        return (self._sure if self.is_sure else self._hesitant).rate

    def judge(self, drafted_tokens: int, accepted_tokens: int) -> None:
        """Take in how many guesses were right."""
        self.drafted_tokens, self.accepted_tokens = drafted_tokens, accepted_tokens
        if drafted_tokens:
            (self._sure if self.is_sure else self._hesitant).see(drafted_tokens, accepted_tokens)

    def settle(self, plain_s: float, lost_s: float) -> None:
        """Take in a pass.

        Args:
            plain_s: What it would have taken with one token of each row.
            lost_s: How much longer it took for the guesses of any row, and what they took to make.
        """
        if self.allowance_s is None:
            self.allowance_s = _FIRST_ALLOWANCE_PASSES * plain_s
        gained_s = self.accepted_tokens * plain_s + _GROWTH * (1 + self.accepted_tokens) * plain_s
        self.allowance_s += gained_s - lost_s
        most_s = _MAX_ALLOWANCE_PASSES * plain_s
        # Nor does one hiccup silence a row for good.
        self.allowance_s = max(-most_s, min(self.allowance_s, most_s))
        if not self.drafted_tokens:
            self._sure.fade(_PLAIN_DECAY)
            self._hesitant.fade(_PLAIN_DECAY)
        self.drafted_tokens = self.accepted_tokens = 0


class DraftPacing:
    """What passes cost on this machine, and with it how many guesses each row may have.

    Attributes:
        batched_gain: Of the last pass of several rows that guesses were thought of for: tokens a
            second with the best number of guesses over those without; None before one.
    """

    def __init__(self) -> None:
        """Know nothing of this machine."""
        self.batched_gain: float | None = None
        self._costs: dict[int, PassCosts] = {}
        self._guess = RecentTimes()
        self._has_guessed = False
        self._passes_since_guess = 0
        self._guessing_s = 0.0

    def open(self) -> RowPacing:
        """Begin with a row that nothing is known of."""
        plain_s = self._of(1).plain_s
        return RowPacing(_FIRST_ALLOWANCE_PASSES * plain_s if plain_s else None)

    def observe_pass(self, rows: Sequence[RowPacing], tokens: int, duration_s: float) -> None:
        """Take in what a decode pass took, sampling included.

        Args:
            rows: Those of the pass, with and without guesses.
            tokens: Of its longest row; the others were padded to that.
            duration_s: Its wall time, without that of guessing.
        """
        costs = self._of(len(rows))
        charged_s = duration_s
        if costs.is_well_known(tokens):
            usual_s = costs.expected_s(tokens)
            charged_s = min(max(duration_s, _MIN_HICCUP * usual_s), _MAX_HICCUP * usual_s)
        is_drafted = any(row.drafted_tokens for row in rows)
        costs.observe(tokens, duration_s, is_drafted=is_drafted)
        guessing_s, self._guessing_s = self._guessing_s, 0.0
        self._passes_since_guess += 1
        if not costs.plain_s:
            return
        lost_s = charged_s - costs.plain_s if is_drafted else 0.0
        for row in rows:
            row.settle(costs.plain_s, lost_s + guessing_s)

    def observe_guessing(self, row: RowPacing, tokens: int, duration_s: float) -> None:
        """Take in what it took to guess so many tokens for a row; zero tokens are a guess, too."""
        del row  # all rows of the pass wait for it
        each_s = duration_s / max(tokens, 1)
        charged_s = duration_s
        if self._guess.is_well_known:
            usual_s = self._guess.middle * max(tokens, 1)
            charged_s = min(duration_s, _MAX_GUESSING_HICCUP * usual_s)
        if tokens or each_s > self._guess.middle:  # finding nothing is often quick: it tells little
            self._guess.add(each_s)
        self._has_guessed |= tokens > 0
        self._guessing_s += charged_s
        self._passes_since_guess = 0

    def observe_verdict(self, row: RowPacing, drafted_tokens: int, accepted_tokens: int) -> None:
        """Take in how many of a row's guesses were right; told before the pass they went through."""
        row.judge(drafted_tokens, accepted_tokens)

    def wanted_tokens(self, rows: Sequence[RowPacing], max_tokens: int) -> list[int]:
        """How many tokens are worth guessing for each row of the next pass; zero for none.

        Asked before anybody guesses, so that nobody guesses in vain. Where guessing costs next to
        nothing it is as many as may be, and :meth:`worthwhile_tokens` decides.
        """
        for row in rows:
            row.is_sure = True
        costs = self._of(len(rows))
        guess_s = self._guess.middle
        count, gain = self._best(rows, [max_tokens] * len(rows), guess_s)
        patience = next(passes for below, passes in _PATIENCE_PASSES if gain < below)
        if costs.longer_since_plain >= patience:
            count = 0
        elif count and not self._has_guessed:
            count = 1  # nobody knows yet what it costs
        elif count and guess_s * max_tokens * len(rows) <= _NEGLIGIBLE * costs.plain_s:
            count = max_tokens
        for row in rows:
            row.wanted_tokens = count
        return [count] * len(rows)

    def worthwhile_tokens(
        self, rows: Sequence[RowPacing], guessed_tokens: Sequence[int]
    ) -> list[int]:
        """How many of the tokens that were guessed for each row to put into the next pass.

        Args:
            rows: Of the pass, in its order.
            guessed_tokens: For each row how many were guessed; zero for rows without.
        """
        for row, guessed in zip(rows, guessed_tokens, strict=True):
            row.is_sure = guessed >= row.wanted_tokens
        count, _ = self._best(rows, guessed_tokens, 0.0)
        return [min(guessed, count) for guessed in guessed_tokens]

    def _of(self, rows: int) -> PassCosts:
        costs = self._costs.get(rows)
        if costs is None:
            costs = self._costs[rows] = PassCosts(rows)
        return costs

    def _best(
        self, rows: Sequence[RowPacing], offered: Sequence[int], guess_s: float
    ) -> tuple[int, float]:
        """The number of guesses that makes the most tokens in its time, and how many times plain's.

        Args:
            rows: Of the pass.
            offered: For each row how many guesses there may be.
            guess_s: What each of them costs before the pass.
        """
        width, costs = len(rows), self._of(len(rows))
        best, best_gain = 0, LEAST_BATCHED_GAIN if width > 1 else 1.0
        plain_s = costs.plain_s
        allowed_s = min(row.allowance_s or 0.0 for row in rows) - self._guessing_s
        if not plain_s or allowed_s <= 0:
            return best, best_gain
        faded = _GUESSING_FADING**self._passes_since_guess
        # What guessing took long ago may have been a hiccup, which nobody could put right otherwise.
        feared_guess = 1.0 if self._passes_since_guess < _FORGIVEN_PASSES else faded
        guessing_s, made, highest = 0.0, float(width), 0.0
        likely = [1.0] * width  # that a row's guesses are right up to here
        rates = [row.acceptance for row in rows]
        for count in range(1, min(max(offered), costs.reach_tokens - 1) + 1):
            for i, rate in enumerate(rates):
                if offered[i] >= count:
                    likely[i] *= rate
                    made += likely[i]
                    guessing_s += guess_s
            if costs.feared_s(1 + count) + feared_guess * guessing_s - plain_s > allowed_s:
                continue
            expected_s = costs.expected_s(1 + count) + faded * guessing_s
            gain = made * plain_s / (width * expected_s)
            highest = max(highest, gain)
            if gain > best_gain:
                best, best_gain = count, gain
        if width > 1 and highest:
            self.batched_gain = highest
        return best, best_gain
