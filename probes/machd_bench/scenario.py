"""One kind of load."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass

from machd_bench.bench import Bench, Mode, Plan
from machd_bench.report import Row

SERVED = frozenset({Mode.SINGLE, Mode.BATCHED, Mode.REMOTE})
BATCHED = frozenset({Mode.BATCHED, Mode.REMOTE})


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A kind of load, and how its rows are shown.

    Attributes:
        name: As ``--scenarios`` takes it.
        about: What happens, and what is told of it.
        run: Measures one mode.
        modes: Those that it can be measured in.
        columns: Figures of the table.
        streams: The most requests that are open at once.
        requests: How many it sends, about.
        starts_servers: Whether it starts its own, so that the mode's must not run beside them.
        has_goal: Whether one of its figures is held against a goal.
    """

    name: str
    about: str
    run: Callable[[Bench], AsyncGenerator[Row]]
    modes: frozenset[Mode]
    columns: tuple[str, ...]
    streams: Callable[[Plan], int] = lambda _plan: 1
    requests: Callable[[Plan], int] = lambda _plan: 0
    starts_servers: bool = False
    has_goal: bool = True
