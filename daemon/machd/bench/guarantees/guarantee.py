"""The protocol of a guarantee, and the loop that repeats its tries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from machd.bench.guarantees.figures import GuaranteeFigures

GIVE_UP_S = 60.0
"""The end of a wait for something that should take a few seconds; the try then counts with it."""

_Subject = TypeVar("_Subject")
_Subject_contra = TypeVar("_Subject_contra", contravariant=True)


@dataclass(frozen=True, slots=True)
class Obstacle:
    """A reason why a guarantee cannot be measured on this machine or model."""

    reason: str


class Guarantee(Protocol[_Subject_contra]):
    """A promise in seconds. Its subject is a running daemon, or what starts one."""

    @property
    def name(self) -> str:
        """As in the table."""
        ...

    @property
    def goal_s(self) -> float:
        """The most that a try may take."""
        ...

    async def try_once(self, subject: _Subject_contra) -> float | Obstacle:
        """Measure once.

        Returns:
            Seconds.

        Raises:
            EngineFaultError: The daemon failed, or did something else than what is measured.
        """
        ...


async def measure(
    guarantee: Guarantee[_Subject], subject: _Subject, tries: int, *, on_try: Callable[[], None]
) -> GuaranteeFigures:
    """Repeat a guarantee's try; an obstacle ends it.

    Args:
        guarantee: What to measure.
        subject: Of what.
        tries: How often.
        on_try: Called after each try, and for those that an obstacle leaves out.

    Raises:
        EngineFaultError: As ``Guarantee.try_once``.
    """
    tries_s: list[float] = []
    reason: str | None = None
    for _ in range(tries):
        if reason is None:
            match await guarantee.try_once(subject):
                case Obstacle() as obstacle:
                    reason = obstacle.reason
                case float() as took_s:
                    tries_s.append(took_s)
        on_try()
    return GuaranteeFigures.of(guarantee.name, guarantee.goal_s, tries_s, reason)
