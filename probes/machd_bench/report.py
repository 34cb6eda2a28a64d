"""The result of a bench as data; ``machd bench --json`` writes a :class:`Report` as it stands here.

Every figure has its unit at the end of its name: ``_s`` seconds, ``_tps`` tokens per second,
``_bytes``, ``_tokens``, ``_ratio`` (times), ``_share`` (of 1); without one it is a count, a name or
a reason. Figures are unrounded, and what is not known is null. ``schema_version`` grows when a field
is renamed or changes its meaning; figures may be added at any time.
"""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path
from typing import Self, TypeAlias

import numpy as np
import psutil
from msgspec import Struct

from machd.capabilities.document import Capabilities

SCHEMA_VERSION = 2

Figure: TypeAlias = float | int | str | None

_CPU_FACTS = Path("/proc/cpuinfo")


class Verdict(StrEnum):
    """The outcome of holding a figure against its goal."""

    PASS = "PASS"  # noqa: S105 - no password
    MISSED = "MISSED"
    NOT_SHOWN = "NOT SHOWN"
    """The figure is missing, or proves neither."""


class Goal(Struct, frozen=True, kw_only=True):
    """A goal and the figure of this run.

    Attributes:
        bound: ``at most`` or ``at least``; a figure equal to its goal passes.
        unit: Of the goal and of the figure: ``s``, ``x`` (a ratio) or ``steps``.
        figure: Null if it was not measured.
    """

    name: str
    bound: str
    goal: float
    unit: str
    figure: float | None
    verdict: Verdict

    @classmethod
    def at_most(
        cls, name: str, goal: float, figure: float | None, *, unit: str = "x", shown: bool = True
    ) -> Self:
        """Judge a figure that must not exceed its goal; ``shown`` is False if it proves nothing."""
        passed = figure is not None and figure <= goal
        verdict = _verdict(passed=passed, shown=shown and figure is not None)
        return cls(name=name, bound="at most", goal=goal, unit=unit, figure=figure, verdict=verdict)

    @classmethod
    def at_least(
        cls, name: str, goal: float, figure: float | None, *, unit: str = "x", shown: bool = True
    ) -> Self:
        """Judge a figure that must not fall below its goal; arguments as of ``at_most``."""
        passed = figure is not None and figure >= goal
        verdict = _verdict(passed=passed, shown=shown and figure is not None)
        return cls(
            name=name, bound="at least", goal=goal, unit=unit, figure=figure, verdict=verdict
        )

    def __str__(self) -> str:
        """One line with the verdict, the figure and the goal."""
        figure = "not measured" if self.figure is None else f"{self.figure:.3g} {self.unit}"
        return f"{self.verdict.value}: {self.name}: {figure}, goal {self.bound} {self.goal:g} {self.unit}"


def _verdict(*, passed: bool, shown: bool) -> Verdict:
    if not shown:
        return Verdict.NOT_SHOWN
    return Verdict.PASS if passed else Verdict.MISSED


class Row(Struct, frozen=True, kw_only=True):
    """One line of a scenario.

    Attributes:
        scenario: Its name; the runner fills it in, and ``mode``.
        mode: How the server decodes: ``single``, ``static``, ``continuous``, ``remote``; or
            ``settings`` where it was started with the user's settings alone.
        case: What of the scenario, such as ``4 clients``.
        figures: By name.
        samples: Lists that a plot is drawn from.
    """

    scenario: str = ""
    mode: str = ""
    case: str
    figures: dict[str, Figure]
    samples: dict[str, list[float]] = {}
    goals: list[Goal] = []

    def number(self, name: str) -> float:
        """A figure that is a number; 0 where it is not known."""
        value = self.figures.get(name)
        return float(value) if isinstance(value, int | float) else 0.0


class MachineFacts(Struct, frozen=True, kw_only=True):
    """The machine, so that it can be seen whether two reports can be compared.

    Attributes:
        cpu_count: Processors that this process may use.
        load_average: Of the minute before the bench; null where the system does not tell.
    """

    platform: str
    cpu: str
    cpu_count: int
    memory_bytes: int
    python: str
    load_average: float | None

    @classmethod
    def read(cls) -> Self:
        """Look at this machine."""
        cpu, load_average = platform.processor() or platform.machine(), None
        with contextlib.suppress(OSError):
            load_average = os.getloadavg()[0]
        with contextlib.suppress(OSError):  # only Linux has this file, and the model's name in it
            facts = _CPU_FACTS.read_text(encoding="utf-8", errors="replace").splitlines()
            names = [line.partition(":")[2] for line in facts if line.startswith("model name")]
            cpu = names[0].strip() if names else cpu
        try:
            cpu_count = len(os.sched_getaffinity(0))
        except AttributeError:
            cpu_count = os.cpu_count() or 1
        return cls(
            platform=platform.platform(),
            cpu=cpu,
            cpu_count=cpu_count,
            memory_bytes=int(psutil.virtual_memory().total),
            python=platform.python_version(),
            load_average=load_average,
        )


class ModelFacts(Struct, frozen=True, kw_only=True):
    """What was served, as the server says; only machd says more than the name.

    Attributes:
        versions: Of machd, mlx and mlx-lm.
    """

    id: str
    weights_bytes: int | None = None
    dtype: str | None = None
    quantization: str | None = None
    backend: str | None = None
    blas: str | None = None
    versions: dict[str, str | None] = {}

    @classmethod
    def of(cls, model_id: str, capabilities: Capabilities | None) -> Self:
        """Take from machd's capabilities what identifies a measurement."""
        if capabilities is None:
            return cls(id=model_id)
        model, versions = capabilities.model, capabilities.versions
        return cls(
            id=model_id,
            weights_bytes=model.weights_bytes,
            dtype=model.dtype,
            quantization=model.quantization,
            backend=capabilities.device.backend,
            blas=capabilities.device.blas,
            versions={"machd": versions.machd, "mlx": versions.mlx, "mlx_lm": versions.mlx_lm},
        )


class Report(Struct, frozen=True, kw_only=True):
    """A whole bench.

    Attributes:
        started_at: RFC 3339, UTC.
        url: The server that was measured; null where the bench started its own.
        plan: The loads, by the names of their flags.
        goals: Of all rows, in their order.
        notes: What was left out or has to be known besides, and why.
    """

    schema_version: int = SCHEMA_VERSION
    started_at: str
    url: str | None
    machine: MachineFacts
    model: ModelFacts
    plan: dict[str, object]
    rows: list[Row]
    goals: list[Goal]
    notes: list[str]

    def of(self, scenario: str) -> list[Row]:
        """The rows of one scenario."""
        return [row for row in self.rows if row.scenario == scenario]


def percentiles(name: str, sample_s: Iterable[float]) -> dict[str, Figure]:
    """``{name}_p50_s``, ``_p90_s`` and ``_p99_s``, linear between ranks; null for no sample."""
    sample = list(sample_s)
    values = np.percentile(sample, (50, 90, 99)).tolist() if sample else (None, None, None)
    return dict(zip((f"{name}_p50_s", f"{name}_p90_s", f"{name}_p99_s"), values, strict=True))
