"""A report to attach to an issue: figures alone, and nothing that tells whose machine it was.

Left out are URLs, paths, error texts, notes and every text that is not of a known kind: the bench's own words
and the names of formats, verdicts and probes. The name of a model on this machine's disk is left out as well; one that a hub or
machd itself gave stays.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Iterable
from enum import StrEnum

import msgspec
from msgspec import Struct

from machd_bench.report import Figure, Goal, Row

_TEXTS = frozenset(
    {
        *("actual", "batching", "decode_mode", "expected", "format", "source", "verdict"),
        *("tokens_counted_by", "workload"),
    }
)
"""Figures that are words of machd's own."""
_PROBE_PREFIX = "probe_"
_WORD = re.compile(r"[A-Za-z0-9_ .-]{1,40}")
"""Characters of such words: no path, no URL, no sentence."""
LOCAL_MODEL = "a model on disk"


class Outcome(StrEnum):
    """Outcome of a part of the report."""

    MEASURED = "measured"
    FAILED = "failed"
    LEFT_OUT = "left out"
    """It cannot be measured with this model or on this machine."""
    NOT_RUN = "not run"


class Part(Struct, kw_only=True):
    """One scenario of the report.

    Attributes:
        error: Class of the error that ended it, without its text.
        error_code: Its stable code, if it is an error of machd's.
        wall_s: Time that it took.
    """

    scenario: str
    outcome: Outcome = Outcome.NOT_RUN
    error: str | None = None
    error_code: str | None = None
    wall_s: float | None = None


class SharedReport(Struct, kw_only=True):
    """The whole of it.

    Attributes:
        started_at: RFC 3339, UTC.
        size: ``usual`` or ``quick``.
        parts: In the order in which they run; those that are still to come are ``not run``.
    """

    schema_version: int = 1
    started_at: str
    size: str
    machine: dict[str, Figure]
    model: dict[str, Figure]
    plan: dict[str, object]
    parts: list[Part]
    rows: list[Row] = []
    goals: list[Goal] = []

    def add(self, rows: Iterable[Row]) -> None:
        """Take rows in, without what is not to be shared."""
        for row in rows:
            figures = {name: _shared(name, value) for name, value in row.figures.items()}
            self.rows.append(msgspec.structs.replace(row, figures=figures))
            self.goals.extend(row.goals)

    def of(self, scenario: str) -> list[Row]:
        """The rows of one scenario."""
        return [row for row in self.rows if row.scenario == scenario]


def shared_machine(facts: dict[str, Figure]) -> dict[str, Figure]:
    """Return a machine's facts, with the system's version in place of its build, whose name can be of a person."""
    version = platform.mac_ver()[0] or platform.release()
    numbers = re.match(r"[\d.]*\d", version)
    system = "macOS" if platform.mac_ver()[0] else platform.system()
    return {**facts, "platform": f"{system} {numbers[0] if numbers else ''} {platform.machine()}"}


def shared_model(facts: dict[str, Figure], *, is_local: bool) -> dict[str, Figure]:
    """Return a model's facts; a name that its owner gave it is replaced."""
    return {**facts, "id": LOCAL_MODEL} if is_local else dict(facts)


def _shared(name: str, value: Figure) -> Figure:
    if not isinstance(value, str):
        return value
    is_known = name in _TEXTS or name.startswith(_PROBE_PREFIX)
    return value if is_known and _WORD.fullmatch(value) else None
