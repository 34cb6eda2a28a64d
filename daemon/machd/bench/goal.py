"""One goal of a bench, the figure that is held against it, and the verdict."""

from __future__ import annotations

from enum import StrEnum
from typing import Self

from msgspec import Struct


class Verdict(StrEnum):
    """The outcome of holding a figure against its goal."""

    PASS = "PASS"  # noqa: S105 - no password
    MISSED = "MISSED"
    NOT_SHOWN = "NOT SHOWN"
    """The figure is missing, or proves neither."""


class Bound(StrEnum):
    """The side of its goal on which a figure passes; a figure equal to its goal passes."""

    AT_MOST = "at most"
    AT_LEAST = "at least"


class Goal(Struct, frozen=True, kw_only=True):
    """A goal and the figure of this run.

    Attributes:
        name: The subject of the figure, with the mode where several are compared.
        unit: Of the goal and of the figure: ``s``, ``x`` (a ratio) or ``steps``.
        figure: Null if it was not measured.
    """

    name: str
    bound: Bound
    goal: float
    unit: str
    figure: float | None
    verdict: Verdict

    @classmethod
    def at_most(
        cls, name: str, goal: float, figure: float | None, unit: str = "x", *, shown: bool = True
    ) -> Self:
        """Judge a figure that must not exceed its goal.

        Args:
            name: The subject of the figure.
            goal: The largest figure that passes.
            figure: None if it was not measured.
            unit: Of both.
            shown: False if the figure proves nothing, such as one of prompts that are too short.
        """
        return cls._judged(name, Bound.AT_MOST, goal, figure, unit, is_shown=shown)

    @classmethod
    def at_least(
        cls, name: str, goal: float, figure: float | None, unit: str = "x", *, shown: bool = True
    ) -> Self:
        """Judge a figure that must not fall below its goal; the arguments are those of ``at_most``."""
        return cls._judged(name, Bound.AT_LEAST, goal, figure, unit, is_shown=shown)

    @classmethod
    def _judged(
        cls,
        name: str,
        bound: Bound,
        goal: float,
        figure: float | None,
        unit: str,
        *,
        is_shown: bool,
    ) -> Self:
        verdict = Verdict.NOT_SHOWN
        if is_shown and figure is not None:
            is_reached = figure <= goal if bound is Bound.AT_MOST else figure >= goal
            verdict = Verdict.PASS if is_reached else Verdict.MISSED
        return cls(name=name, bound=bound, goal=goal, unit=unit, figure=figure, verdict=verdict)

    def __str__(self) -> str:
        """One line with the verdict, the goal and the figure."""
        figure = "not measured" if self.figure is None else f"{self.figure:.3g} {self.unit}"
        goal = f"{self.bound.value} {self.goal:g} {self.unit}"
        return f"{self.verdict.value}: {self.name}: {figure}, goal {goal}"
