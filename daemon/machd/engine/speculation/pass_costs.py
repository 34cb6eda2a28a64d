"""What a pass over several tokens of each row costs, learnt from passes that noise lengthens.

Two things are kept apart. How long a pass over one token of each row takes follows the context and
the machine's mood, so it is the middle of the latest ones. How much longer a pass over more tokens
takes than that is a property of the machine, so it is remembered as a ratio, and for longer. What was
never measured is reckoned from its neighbours, and from a prior where it has none.
"""

from __future__ import annotations

from collections import deque

_PRIOR_TOKENS = 20.0
"""What a pass costs before its first token, in tokens of one row: 52 ms against 2.6 ms on the CPU
(docs/internals/performance.md)."""

_SAMPLES = 12
_MIN_SAMPLES = 5
_WELL_KNOWN_SAMPLES = 4
_FEW_SAMPLES = 8
"""Of so few the middle one counts, of two in the middle the lower one, since noise only lengthens; of more
the mean of the middle half."""

_PRIOR_WEIGHT = 0.5
"""What the prior counts against each measurement."""

_MIN_OF_PRIOR = 0.25
"""A further token costs this much of the prior at least, whatever noise says: one that seems to be free
would be guessed without end."""

_STALE_RATIO = 0.8
"""A pass over several tokens cannot be shorter than one over one token. Where it is, beyond noise, those
of one token were measured in another time, such as beside another program or in a long context."""

_FADING = 0.998
"""How much the weight of a ratio falls with each pass that does not measure it, so that what seemed not
to pay once is measured again one day."""

_RECKON_PASSES = 16
"""After so many passes ratios that are well known are reckoned anew."""


class RecentTimes:
    """The middle of the latest durations, or of their ratios, which a hiccup does not move."""

    __slots__ = ("_latest", "middle")

    def __init__(self) -> None:
        """Know nothing: the middle is 0."""
        self._latest: deque[float] = deque(maxlen=_SAMPLES)
        self.middle = 0.0

    def __len__(self) -> int:
        """How many there are, twelve at the most."""
        return len(self._latest)

    @property
    def is_well_known(self) -> bool:
        """Whether one more that is far away is a hiccup rather than news."""
        return len(self._latest) >= _WELL_KNOWN_SAMPLES

    def add(self, one: float) -> None:
        """Take in one more."""
        self._latest.append(one)
        ordered = sorted(self._latest)
        count = len(ordered)
        if count <= _FEW_SAMPLES:
            self.middle = ordered[(count - 1) // 2]
            return
        middle = ordered[count // 4 : count - count // 4]
        self.middle = sum(middle) / len(middle)


class PassCosts:
    """Of passes of one number of rows. Durations come in; there is no clock in here.

    Attributes:
        longer_since_plain: Passes with guesses since the last one over one token.
    """

    def __init__(self, rows: int) -> None:
        """Know nothing but the prior."""
        self.longer_since_plain = 0
        self._prior_slope = rows / (_PRIOR_TOKENS + rows)
        self._plain = RecentTimes()
        self._ratios: dict[int, RecentTimes] = {}
        self._measured_at: dict[int, int] = {}
        self._passes = 0
        self._expected: dict[int, float] = {}
        self._feared: dict[int, float] = {}

    @property
    def plain_s(self) -> float:
        """Seconds of a pass over one token of each row; 0 until five have been measured."""
        return self._plain.middle if len(self._plain) >= _MIN_SAMPLES else 0.0

    @property
    def reach_tokens(self) -> int:
        """Twice the longest that was measured: further would be a leap."""
        return 2 * max(self._ratios, default=1)

    def observe(self, tokens: int, duration_s: float, *, is_drafted: bool = True) -> None:
        """Take in what a pass took, over ``tokens`` of its longest row, of which some are guesses or none."""
        self._passes += 1
        is_new = tokens > 1 and not self.is_well_known(tokens)
        if tokens > 1:
            self.longer_since_plain += is_drafted
            self._see_longer(tokens, duration_s)
        else:
            self.longer_since_plain = 0
            self._plain.add(duration_s)
        if is_new or self._passes % _RECKON_PASSES == 0:
            self._expected.clear()
            self._feared.clear()

    def is_well_known(self, tokens: int) -> bool:
        """Whether passes over so many tokens were measured several times."""
        return tokens in self._ratios and self._ratios[tokens].is_well_known

    def expected_s(self, tokens: int) -> float:
        """Seconds of a pass, hopeful about what was measured long ago or never."""
        ratio = self._expected.get(tokens)
        if ratio is None:
            ratio = self._expected[tokens] = self._ratio(tokens, is_cautious=False)
        return self.plain_s * ratio

    def feared_s(self, tokens: int) -> float:
        """Seconds of a pass by all that was ever measured: what must be there to be lost."""
        ratio = self._feared.get(tokens)
        if ratio is None:
            ratio = self._feared[tokens] = self._ratio(tokens, is_cautious=True)
        return self.plain_s * ratio

    def _see_longer(self, tokens: int, duration_s: float) -> None:
        if not self.plain_s:
            return
        if duration_s < _STALE_RATIO * self.plain_s:
            self._plain.add(duration_s)
        ratio = duration_s / self.plain_s
        if tokens not in self._ratios:
            # A pass over more tokens takes less for each of them: beyond that it was a hiccup.
            below = max((one for one in self._ratios if one < tokens), default=1)
            most = self._ratio(below, is_cautious=True) if below > 1 else 1.0
            ratio = min(ratio, most * tokens / below)
        self._ratios.setdefault(tokens, RecentTimes()).add(ratio)
        self._measured_at[tokens] = self._passes

    def _ratio(self, tokens: int, *, is_cautious: bool) -> float:
        """In passes over one token."""
        prior = 1.0 + self._prior_slope * (tokens - 1)
        measured = self._ratios.get(tokens)
        if measured is None:
            found = self._reckoned(tokens, is_cautious=is_cautious)
        else:
            age = 0 if is_cautious else self._passes - self._measured_at[tokens]
            weight = len(measured) * _FADING**age
            found = (_PRIOR_WEIGHT * prior + weight * measured.middle) / (_PRIOR_WEIGHT + weight)
        return max(found, 1.0 + _MIN_OF_PRIOR * (prior - 1.0))

    def _reckoned(self, tokens: int, *, is_cautious: bool) -> float:
        """From the nearest that were measured; beyond them by the prior, or as they grew."""
        below = max((one for one in self._ratios if one < tokens), default=1)
        above = min((one for one in self._ratios if one > tokens), default=None)
        low = self._ratio(below, is_cautious=is_cautious) if below > 1 else 1.0
        if above is not None:
            high = self._ratio(above, is_cautious=is_cautious)
            return low + (high - low) * (tokens - below) / (above - below)
        slope = self._prior_slope
        if is_cautious and below > 1:
            slope = max(slope, (low - 1.0) / (below - 1))
        return low + slope * (tokens - below)
