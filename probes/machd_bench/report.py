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
from typing import Literal, Self, TypeAlias

import numpy as np
import psutil
from msgspec import Struct

from machd.served.capabilities import Capabilities

Figure: TypeAlias = float | int | str | None
Bound: TypeAlias = Literal["at most", "at least"]


class Verdict(StrEnum):
    """The outcome of holding a figure against its goal."""

    PASS = "PASS"  # noqa: S105 - no password
    MISSED = "MISSED"
    NOT_SHOWN = "NOT SHOWN"
    """The figure is missing, or proves neither."""


class Goal(Struct, frozen=True, kw_only=True):
    """A goal and the figure of this run.

    Attributes:
        bound: A figure equal to its goal passes.
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
    def judge(
        cls,
        name: str,
        bound: Bound,
        goal: float,
        figure: float | None,
        *,
        unit: str = "x",
        shown: bool = True,
    ) -> Self:
        """Hold a figure against its goal; ``shown`` is False if it proves nothing."""
        verdict = Verdict.NOT_SHOWN
        if shown and figure is not None:
            passed = figure <= goal if bound == "at most" else figure >= goal
            verdict = Verdict.PASS if passed else Verdict.MISSED
        return cls(name=name, bound=bound, goal=goal, unit=unit, figure=figure, verdict=verdict)

    def __str__(self) -> str:
        """One line with the verdict, the figure and the goal."""
        figure = "not measured" if self.figure is None else f"{self.figure:.3g} {self.unit}"
        goal = f"{self.bound} {self.goal:g} {self.unit}"
        return f"{self.verdict.value}: {self.name}: {figure}, goal {goal}"


class Row(Struct, kw_only=True):
    """One line of a scenario.

    Attributes:
        scenario: Its name; the runner fills it in, and ``mode``.
        mode: How the server decodes: ``single``, ``static``, ``batched``, ``remote``; or
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


class Report(Struct, frozen=True, kw_only=True):
    """A whole bench.

    Attributes:
        started_at: RFC 3339, UTC.
        url: The server that was measured; null where the bench started its own.
        plan: The loads, by the names of their flags.
        goals: Of all rows, in their order.
        notes: What was left out or has to be known besides, and why.
    """

    schema_version: int = 2
    started_at: str
    url: str | None
    machine: dict[str, Figure]
    model: dict[str, Figure]
    plan: dict[str, object]
    rows: list[Row]
    goals: list[Goal]
    notes: list[str]

    def of(self, scenario: str) -> list[Row]:
        """The rows of one scenario."""
        return [row for row in self.rows if row.scenario == scenario]


def machine_facts() -> dict[str, Figure]:
    """The machine, and its load in the last minute: whether two reports can be compared."""
    cpu, load_average = platform.processor() or platform.machine(), None
    with contextlib.suppress(OSError):
        load_average = os.getloadavg()[0]
    with contextlib.suppress(OSError):  # Linux tells the processor's name in this file only
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        names = [line.partition(":")[2] for line in lines if line.startswith("model name")]
        cpu = names[0].strip() if names else cpu
    return {
        "platform": platform.platform(),
        "cpu": cpu,
        "cpu_count": len(psutil.Process().cpu_affinity()) if psutil.LINUX else os.cpu_count(),
        "memory_bytes": int(psutil.virtual_memory().total),
        "python": platform.python_version(),
        "load_average": load_average,
    }


def model_facts(model_id: str, capabilities: Capabilities | None) -> dict[str, Figure]:
    """Read the served model from capabilities; a server that is not machd tells its name alone."""
    if capabilities is None:
        return {"id": model_id}
    model, versions = capabilities.model, capabilities.versions
    return {
        "id": model_id,
        "weights_bytes": model.weights_bytes,
        "dtype": model.dtype,
        "quantization": model.quantization,
        "architecture": capabilities.architecture,
        "parameters": model.parameters,
        "context_tokens": model.context_tokens,
        "device": capabilities.device.name,
        "device_memory_bytes": capabilities.device.memory_bytes,
        "backend": capabilities.device.backend,
        "blas": capabilities.device.blas,
        "machd": versions.machd,
        "mlx": versions.mlx,
        "mlx_lm": versions.mlx_lm,
    }


def percentiles(name: str, sample_s: Iterable[float]) -> dict[str, Figure]:
    """``{name}_p50_s``, ``_p90_s`` and ``_p99_s``, linear between ranks; null for no sample."""
    sample = list(sample_s)
    values = np.percentile(sample, (50, 90, 99)).tolist() if sample else (None, None, None)
    return dict(zip((f"{name}_p50_s", f"{name}_p90_s", f"{name}_p99_s"), values, strict=True))
