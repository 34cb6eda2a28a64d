"""One scenario after the other for a shared report: each by itself, so that none keeps the next from running."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime

from machd.clock import Clock
from machd.errors import MachdError
from machd.settings.model import Settings
from machd_bench.bench import Bench, Mode, Plan, Progress
from machd_bench.report import Row, machine_facts
from machd_bench.runner import Runner
from machd_bench.scenario import Scenario
from machd_bench.shared_report import Outcome, Part, SharedReport, shared_machine, shared_model

_MAX_PART_S = 3600.0
"""An end to a part whose backend hangs."""

PLANS = {
    "usual": Plan(
        requests=16,
        concurrencies=(1, 4, 16),
        weight_formats=("bf16", "affine8", "affine4", "mxfp4", "nvfp4"),
        widths=(1, 4, 16),
    ),
    "quick": Plan(
        requests=4,
        prompt_tokens=64,
        max_tokens=32,
        concurrencies=(1, 4),
        long_prompt_tokens=500,
        prefix_tokens=500,
        weight_formats=("bf16", "affine4"),
        widths=(1, 4),
        architectures=("llama", "qwen3_next"),
    ),
}
"""The loads by size: fixed, so that reports of different machines can be compared."""


def empty_report(size: str, scenarios: Sequence[Scenario], plan: Plan) -> SharedReport:
    """A report in which everything is still to come."""
    return SharedReport(
        started_at=datetime.fromtimestamp(plan.started_unix_s, UTC).isoformat(),
        size=size,
        machine=shared_machine(machine_facts()),
        model={},
        plan=asdict(plan),
        parts=[Part(scenario=one.name) for one in scenarios],
    )


class ReportRun:
    """Measures the parts of a report.

    Attributes:
        report: Filled part by part.
    """

    def __init__(
        self,
        report: SharedReport,
        plan: Plan,
        clock: Clock,
        progress: Progress,
        show: Callable[[Scenario, list[Row]], None],
    ) -> None:
        """Prepare; ``show`` is given each scenario with its rows."""
        self.report = report
        self._plan = plan
        self._clock = clock
        self._progress = progress
        self._show = show

    async def measure(
        self,
        scenarios: Sequence[Scenario],
        settings: Settings,
        settings_args: Sequence[str],
        *,
        is_local: bool,
        on_part: Callable[[Part, Sequence[str], Exception | None], None],
    ) -> None:
        """Measure each scenario on servers of its own, and go on with the next whatever became of it.

        Args:
            scenarios: Those of the report's parts, in their order.
            settings: The user's; they name the model.
            settings_args: The same as flags.
            is_local: Whether the model's name is of this machine alone.
            on_part: Told of each part that has ended, its notes, and its error.
        """
        for scenario, part in zip(scenarios, self.report.parts, strict=True):
            bench = Bench(self._plan, self._clock, self._progress)
            began_s, fault = self._clock.monotonic_s(), None
            try:
                async with asyncio.timeout(_MAX_PART_S):
                    runner = Runner(bench, [scenario], self._show)
                    found = await runner.measure_modes([Mode.BATCHED], settings, settings_args)
                self.report.model |= shared_model(found.model, is_local=is_local)
            except Exception as error:  # noqa: BLE001 - whatever it is, the next part says more
                fault = error
                part.error = type(error).__name__
                part.error_code = error.code if isinstance(error, MachdError) else None
            part.wall_s = self._clock.monotonic_s() - began_s
            part.outcome = Outcome.MEASURED if bench.rows else Outcome.LEFT_OUT
            part.outcome = Outcome.FAILED if fault is not None else part.outcome
            self.report.add(bench.rows)
            on_part(part, bench.notes, fault)
