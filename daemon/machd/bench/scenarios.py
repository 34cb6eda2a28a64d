"""What can be measured: the names that ``--scenarios`` takes."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum


class Scenario(StrEnum):
    """A kind of load. The module of the same name runs it and says what its figures mean."""

    SWEEP = "sweep"
    """One level of clients after the other, each client with one request open at any time."""
    STAGGERED = "staggered"
    """A few requests that arrive one after the other, each while those before are answered."""
    LONG_PROMPT = "long-prompt"
    """A long prompt that arrives while other streams run."""
    COALESCING = "coalescing"
    """The same deterministic request from several clients at once."""
    STRUCTURED = "structured"
    """Answers that are held to JSON schemas beside others that are not."""


def scenarios_named(names: Iterable[str]) -> tuple[Scenario, ...]:
    """The scenarios of these names, in the order in which they run.

    Raises:
        ValueError: One of them is none; the message says which there are.
    """
    known = {scenario.value: scenario for scenario in Scenario}
    chosen: set[Scenario] = set()
    for name in names:
        if name not in known:
            raise ValueError(f"{name!r} is no scenario; there are: {', '.join(known)}")
        chosen.add(known[name])
    return tuple(scenario for scenario in Scenario if scenario in chosen)
