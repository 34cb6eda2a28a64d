"""``machd bench --report``: everything about this machine in one folder, to attach to an issue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import click
import msgspec
from click.core import ParameterSource
from rich.console import Console

from machd.cli.progress import EstimatingBar
from machd.cli.stopping import run_stoppable
from machd.clock import SystemClock
from machd.errors import EngineFaultError
from machd.settings.sources import LoadedSettings
from machd_bench.report import Row
from machd_bench.report_page import report_page
from machd_bench.report_run import PLANS, ReportRun, empty_report
from machd_bench.scenario import Scenario
from machd_bench.scenarios.long_prompt import LONG_PROMPT
from machd_bench.scenarios.memory import MEMORY
from machd_bench.scenarios.parity import PARITY, WEIGHTS
from machd_bench.scenarios.prefix import PREFIX
from machd_bench.scenarios.sweep import SWEEP
from machd_bench.scenarios.weight_formats import WEIGHT_FORMATS
from machd_bench.shared_report import Outcome, Part
from machd_bench.table import print_scenario
from machd_guarantees.guarantees import GUARANTEES

_SCENARIOS = (
    *(SWEEP, LONG_PROMPT, PREFIX, MEMORY, WEIGHT_FORMATS),
    *(WEIGHTS, PARITY, GUARANTEES),
)
"""Speed first, then what is right: a report that is broken off has most of what differs between machines."""
_OWN = frozenset({"report_directory", "is_quick"})


def refuse_other_options(ctx: click.Context) -> None:
    """Raise click.UsageError for other options: a report's loads are fixed, so that machines can be compared."""
    for name in ctx.params.keys() - _OWN:
        if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            (spelling,) = [one.opts[0] for one in ctx.command.params if one.name == name]
            raise click.UsageError(f"--report says what is measured: leave {spelling} out")


def measure_report(
    loaded: LoadedSettings, settings_args: list[str], directory: Path, *, is_quick: bool
) -> None:
    """Measure every part, and write report.json and report.html after each.

    Raises:
        EngineFaultError: Parts failed; the report names them.
    """
    size = "quick" if is_quick else "usual"
    clock, console = SystemClock(), Console()
    plan = replace(PLANS[size], started_unix_s=int(clock.unix_s()))
    report = empty_report(size, _SCENARIOS, plan)

    def write() -> None:
        data = msgspec.json.format(msgspec.json.encode(report), indent=2)
        (directory / "report.json").write_bytes(data + b"\n")
        page = report_page(report, _SCENARIOS)
        (directory / "report.html").write_text(page, encoding="utf-8")

    write()
    with EstimatingBar(total=sum(one.requests(plan) for one in _SCENARIOS)) as progress:

        def show(scenario: Scenario, rows: list[Row]) -> None:
            with progress.hidden():
                print_scenario(console, scenario, rows)

        def ended(part: Part, notes: Sequence[str], fault: Exception | None) -> None:
            write()
            with progress.hidden():
                for note in notes:  # they may tell names and paths, which the report must not
                    console.print(f"note: {note}", markup=False, highlight=False)
                if fault is not None:
                    click.echo(f"machd: {part.scenario} failed: {part.error}: {fault}", err=True)

        run = ReportRun(report, plan, clock, progress, show)
        model_path = loaded.settings.model.path
        is_local = model_path is not None and Path(model_path).exists()
        run_stoppable(
            run.measure(
                _SCENARIOS, loaded.settings, settings_args, is_local=is_local, on_part=ended
            )
        )
    console.print(f"report.json and report.html are in {directory}", markup=False, highlight=False)
    if failed := [one.scenario for one in report.parts if one.outcome is Outcome.FAILED]:
        raise EngineFaultError(f"did not get through: {', '.join(failed)}; the report says so")
