"""``machd bench``: how fast a server is, and how fast it could be."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click
import msgspec
from rich.console import Console

from machd.bench.goal import Goal, Verdict
from machd.bench.guarantees.run import GuaranteesBench
from machd.bench.long_prompt import LongPromptLoad
from machd.bench.modes import CONTINUOUS, MODES, REMOTE, Mode
from machd.bench.plan import BenchPlan
from machd.bench.plot import write_plot
from machd.bench.prefix.plan import PrefixPlan
from machd.bench.prefix.plot import write_prefix_plot
from machd.bench.prefix.run import PrefixBench
from machd.bench.prefix.sharing import SharedPrompt
from machd.bench.progress import BenchProgress
from machd.bench.report import BenchReport
from machd.bench.run import Bench
from machd.bench.scenarios import Scenario
from machd.bench.speculation.plan import SpeculationPlan
from machd.bench.speculation.plot import write_speculation_plot
from machd.bench.speculation.run import SpeculationBench
from machd.bench.table import ReportPrinter
from machd.bench.target import TargetHints
from machd.bench.workload import Workload
from machd.cli.bench_options import (
    check_goals,
    check_guarantees,
    check_measured,
    check_plot,
    check_speculation,
    check_url,
    count_option,
    guarantees_option,
    prefix_options,
    read_concurrencies,
    read_fields,
    read_modes,
    read_output_file,
    read_scenarios,
    read_url,
    speculation_options,
)
from machd.cli.options import SettingsCommand, model_argument, settings_options
from machd.cli.stopping import run_stoppable
from machd.clock import SystemClock
from machd.settings.keys import setting_keys
from machd.settings.sources import LoadedSettings, OriginKind, process_environ

_NO_SERVER = 69
_GOAL_MISSED = 1
_KEY_VARIABLE = "OPENAI_API_KEY"
_file_type = click.Path(path_type=Path)


@click.command(cls=SettingsCommand)
@click.option(
    "--url",
    metavar="URL",
    callback=read_url,
    help="Measure the server at URL, machd or another of the"
    f" OpenAI API, instead of starting one. Its key is read from ${_KEY_VARIABLE}.",
)
@click.option(
    "--concurrency",
    "concurrencies",
    default="1,2,4",
    show_default=True,
    metavar="N,...",
    callback=read_concurrencies,
    help="Clients of each level of the sweep; each has one request open at any time.",
)
@count_option("--requests", 8, "Requests a level, rounded up to as many for every client.")
@count_option("--prompt-tokens", 128, "About how long prompts are.")
@count_option("--max-tokens", 64, "How long answers are; two make the first time between tokens.")
@click.option(
    "--compare",
    "modes",
    metavar="MODE,...",
    callback=read_modes,
    help="Ways to decode, one after the other:"
    f" {', '.join(mode.name for mode in MODES)}.  [default: {MODES[0].name}]",
)
@click.option(
    "--scenarios",
    default=Scenario.SWEEP.value,
    show_default=True,
    metavar="NAME,...",
    callback=read_scenarios,
    help=f"What to measure: {', '.join(Scenario)}.",
)
@count_option(
    "--long-prompt-tokens",
    LongPromptLoad().prompt_tokens,
    "About how long the prompt is that joins running streams.",
)
@prefix_options
@speculation_options
@guarantees_option
@click.option(
    "--check",
    "is_check",
    is_flag=True,
    help="Exit with code 1 if a goal of the run is missed, and name each on standard error.",
)
@click.option(
    "--model-id",
    metavar="NAME",
    help="With --url: which of the server's models; its first one unless given.",
)
@click.option(
    "--extra-body",
    "extra",
    metavar="JSON",
    callback=read_fields,
    help="With --url: fields for every request, such as '{\"ignore_eos\": true}'.",
)
@click.option(
    "--json",
    "json_file",
    type=_file_type,
    callback=read_output_file,
    help="Write the figures to this file.",
)
@click.option(
    "--plot",
    "plot_file",
    type=_file_type,
    callback=read_output_file,
    help="Draw the figures into this PNG file; needs matplotlib.",
)
@model_argument
@settings_options
def bench(
    loaded: LoadedSettings,
    *,
    url: str | None,
    concurrencies: tuple[int, ...],
    requests: int,
    prompt_tokens: int,
    max_tokens: int,
    modes: tuple[Mode, ...],
    scenarios: tuple[Scenario, ...],
    long_prompt_tokens: int,
    is_prefix: bool,
    prefix_tokens: int,
    users: int,
    system_tokens: int,
    kv_formats: tuple[str, ...],
    is_speculation: bool,
    speculation_tokens: int,
    speculation_rounds: int,
    is_guarantees: bool,
    is_check: bool,
    model_id: str | None,
    extra: dict[str, object] | None,
    json_file: Path | None,
    plot_file: Path | None,
) -> None:
    """Measure MODEL, or the embedded default, over HTTP and against a bare model loop.

    Starts a server for each mode, sends it streamed completions, and tells latencies and tokens/s.
    In turns with the server it times the bare loop, a forward pass and an argmax and nothing else,
    which is the most that the machine could do. Settings are handed to the server. The mode static
    is mlx-lm's batch_generate without a server.

    The scenarios: sweep, clients that start together and each keep one request open; staggered,
    requests that arrive one after the other; long-prompt, one that joins running streams;
    coalescing, identical requests at once; structured, completions of which every other one is
    held to a JSON schema. The last three need a mode that batches.

    With --prefix it measures the prefix cache instead: what prompts find in it, also after a
    restart, what a shared system prompt saves, and what a full cache costs.

    With --speculation it starts two daemons, one that guesses ahead as the settings say and one
    that does not, and asks both in turns for answers that copy much of their prompts, and little.

    With --guarantees it starts daemons and measures what machd promises in seconds.

    With --check a missed goal of the run makes the exit code 1.
    """
    arguments = forwarded_arguments(loaded)
    hints = (model_id, extra)
    check_url(url, hints, has_own=bool(modes or arguments))
    guessing_mode = loaded.settings.speculation.mode
    has_prefix = is_prefix or bool(kv_formats)
    if is_speculation:
        check_speculation(guessing_mode, modes, scenarios, url, has_prefix=has_prefix)
    if is_guarantees:
        check_guarantees(modes, scenarios, url, has_others=has_prefix or is_speculation)
    modes = modes or ((CONTINUOUS,) if is_prefix else MODES[:1])
    measured = (REMOTE,) if url else modes
    check_measured(measured, scenarios, kv_formats, is_prefix=is_prefix)
    if is_check and not (is_prefix or is_speculation or is_guarantees):
        check_goals(scenarios, measured)
    check_plot(plot_file, scenarios, is_guarantees=is_guarantees)
    clock = SystemClock()
    workload = Workload(requests, prompt_tokens, max_tokens, seed=int(clock.unix_s()))
    plan = BenchPlan(
        workload,
        concurrencies,
        scenarios,
        long_prompt=LongPromptLoad(prompt_tokens=long_prompt_tokens),
    )
    sharing = SharedPrompt(users, system_tokens)
    prefix_plan = PrefixPlan.sized(prefix_tokens, sharing, kv_formats)
    speculation_plan = SpeculationPlan(guessing_mode, speculation_tokens, speculation_rounds)
    printer = ReportPrinter(Console())
    with BenchProgress() as progress:
        run: Bench | PrefixBench = Bench(plan, clock=clock, progress=progress)
        if is_prefix:
            run = PrefixBench(
                prefix_plan, workload, clock=clock, progress=progress, show=printer.show
            )
        pair = SpeculationBench(speculation_plan, workload, clock=clock, progress=progress)
        promises = GuaranteesBench(workload, clock=clock, progress=progress)
        if url is not None:
            report = _run_remote(run, url, *hints)
        elif is_guarantees:
            report = run_stoppable(promises.measure(arguments))
        elif is_speculation:
            report = run_stoppable(pair.measure(arguments))
        else:
            report = run_stoppable(run.measure_modes(modes, arguments))
    printer.finish(report)
    _write(report, json_file, plot_file)
    _tell_goals(report.goals if is_check else [])


def _write(report: BenchReport, json_file: Path | None, plot_file: Path | None) -> None:
    if json_file is not None:
        json_file.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")
    if plot_file is not None:
        if report.speculation is not None:
            write_speculation_plot(report, plot_file)
            return
        draw = write_prefix_plot if report.prefix else write_plot
        draw(report, plot_file)


def _tell_goals(goals: Sequence[Goal]) -> None:
    """Name each goal that is not reached, or not shown to be; a missed one is exit code 1."""
    for goal in goals:
        if goal.verdict is not Verdict.PASS:
            click.echo(f"machd: {goal}", err=True)
    if any(goal.verdict is Verdict.MISSED for goal in goals):
        raise click.exceptions.Exit(_GOAL_MISSED)


def forwarded_arguments(loaded: LoadedSettings) -> list[str]:
    """The settings file and the settings flags of this command, for a command of the same user.

    What came from variables need not be handed on: the other command sees them itself.
    """
    arguments: list[str] = []
    origins = loaded.origins
    if any(origin.kind is OriginKind.FILE for origin in origins.values()):
        arguments += ["--config", str(loaded.config_file)]
    for key in setting_keys():
        if origins[key.dotted].kind is not OriginKind.FLAG:
            continue
        value: object = getattr(getattr(loaded.settings, key.section), key.name)
        flag = key.flag_names[0]
        if isinstance(value, bool):
            arguments.append(flag if value else f"--no-{flag[2:]}")
        else:
            text = ",".join(value) if isinstance(value, tuple) else value
            arguments += [flag, "" if text is None else str(text)]
    return arguments


def _run_remote(
    run: Bench | PrefixBench, url: str, model_id: str | None, extra: dict[str, object] | None
) -> BenchReport:
    api_key = process_environ().get(_KEY_VARIABLE)
    try:
        return run_stoppable(run.measure_url(url, TargetHints(api_key, model_id, extra or {})))
    except OSError as error:
        reason = error.strerror or str(error) or "no answer in time"
        click.echo(f"machd: {url} does not answer: {reason}", err=True)
        raise click.exceptions.Exit(_NO_SERVER) from None
