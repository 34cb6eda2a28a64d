"""What a daemon's ``/metrics`` say of its guesses.

Only the counters of guesses are looked for, line by line: a whole reader of the format belongs to
others, and so does its library.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

_PREFIX = "machd_speculation_"
_SAMPLE = re.compile(
    _PREFIX.encode() + rb'(?P<name>\w+)_total(?:\{position="(?P<position>\d+)"\})? (?P<value>\S+)'
)
_DRAFTED = "draft_tokens"
_ACCEPTED = "accepted_tokens"
_DRAFTED_BY_POSITION = "draft_by_position_tokens"
_ACCEPTED_BY_POSITION = "accepted_by_position_tokens"
_CYCLES = "cycles"
_FALLBACKS = "fallbacks"


@dataclass(frozen=True, slots=True)
class DraftCounters:
    """Counts since a daemon's start, or between two moments.

    Attributes:
        drafted_tokens: Guesses that were verified.
        accepted_tokens: Those that were right.
        drafted_by_position: How many first, second, ... guesses there were; keys from 1 on.
        accepted_by_position: How many of them were right, with all before them.
        cycles: Passes that verified guesses; None where the daemon does not say.
        fallbacks: Requests for which guessing failed; None where the daemon does not say.
    """

    drafted_tokens: int = 0
    accepted_tokens: int = 0
    drafted_by_position: Mapping[int, int] = field(default_factory=dict)
    accepted_by_position: Mapping[int, int] = field(default_factory=dict)
    cycles: int | None = None
    fallbacks: int | None = None

    @classmethod
    def read(cls, page: bytes) -> Self | None:
        """Take them from a page of metrics; None if guesses are not among them."""
        counts: dict[str, int] = {}
        by_position: dict[str, dict[int, int]] = {}
        for line in page.splitlines():
            if (sample := _SAMPLE.fullmatch(line)) is None:
                continue
            name, value = sample["name"].decode(), int(float(sample["value"]))
            if sample["position"] is None:
                counts[name] = value
            else:
                by_position.setdefault(name, {})[int(sample["position"])] = value
        if _DRAFTED not in counts or _ACCEPTED not in counts:
            return None
        return cls(
            counts[_DRAFTED],
            counts[_ACCEPTED],
            by_position.get(_DRAFTED_BY_POSITION, {}),
            by_position.get(_ACCEPTED_BY_POSITION, {}),
            counts.get(_CYCLES),
            counts.get(_FALLBACKS),
        )

    def __add__(self, other: Self) -> Self:
        """Both together."""
        return self._with(other, 1)

    def __sub__(self, earlier: Self) -> Self:
        """What has come since an earlier moment."""
        return self._with(earlier, -1)

    def _with(self, other: Self, sign: int) -> Self:
        return type(self)(
            self.drafted_tokens + sign * other.drafted_tokens,
            self.accepted_tokens + sign * other.accepted_tokens,
            _sums(self.drafted_by_position, other.drafted_by_position, sign),
            _sums(self.accepted_by_position, other.accepted_by_position, sign),
            _sum(self.cycles, other.cycles, sign),
            _sum(self.fallbacks, other.fallbacks, sign),
        )


def _sums(one: Mapping[int, int], other: Mapping[int, int], sign: int) -> dict[int, int]:
    return {key: one.get(key, 0) + sign * other.get(key, 0) for key in sorted({*one, *other})}


def _sum(one: int | None, other: int | None, sign: int) -> int | None:
    return None if one is None or other is None else one + sign * other
