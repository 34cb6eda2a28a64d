"""``machd bench``: how fast a server is, and how fast it could be."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import click
import msgspec
from rich.console import Console

from machd.cli.bench_options import (
    count_options,
    each_parsed_by,
    flag,
    json_fields,
    levels,
    names_of,
    output_directory,
    output_file,
    parsed_by,
    server_url,
    shares,
)
from machd.cli.bench_report import measure_report, refuse_other_options
from machd.cli.generated_vision_model import generated_vision_model, with_model
from machd.cli.options import SettingsCommand, model_argument, settings_options
from machd.cli.progress import CountingBar
from machd.cli.stopping import run_stoppable
from machd.clock import SystemClock
from machd.errors import EngineFaultError
from machd.installed import how_to_install
from machd.settings.keys import setting_keys
from machd.settings.sources import LoadedSettings, OriginKind, process_environ
from machd_bench.bench import Bench, Mode, Plan
from machd_bench.peer import Peer
from machd_bench.plot import can_plot, write_plot
from machd_bench.report import Report, Row, Verdict
from machd_bench.runner import Runner
from machd_bench.scenario import Scenario
from machd_bench.scenarios import SCENARIOS
from machd_bench.scenarios.kv_formats import FORMATS
from machd_bench.scenarios.speculation import OFF
from machd_bench.scenarios.weight_formats import FORMATS as WEIGHT_FORMAT_SETTINGS
from machd_bench.table import print_scenario, print_summary
from machd_guarantees.guarantees import GUARANTEES

_NO_SERVER = 69
_GOAL_MISSED = 1
_KEY_VARIABLE = "OPENAI_API_KEY"
_MODES = (Mode.SINGLE, Mode.STATIC, Mode.BATCHED)
_ALIASES = {"continuous": Mode.BATCHED}
_MAIN_OPTIONS = (
    *("url", "peers", "concurrencies", "modes", "names", "report_directory"),
    *("requests", "prompt_tokens", "max_tokens", "is_check", "json_file", "plot_file"),
)
_PREFIX = ("prefix", "sharing")
_SPECULATION = ("speculation", "speculation-batched")
_VISION = ("vision-prefix", "image-join")
_SCENARIOS = {**SCENARIOS, GUARANTEES.name: GUARANTEES}


_file_type = click.Path(path_type=Path)


@click.command(
    cls=SettingsCommand,
    short_help="Measure how fast a model is served, over HTTP.",
    main_options=_MAIN_OPTIONS,
)
@click.option(
    "--url",
    metavar="URL",
    callback=parsed_by(server_url),
    help="Measure the server at URL, machd or another of the"
    f" OpenAI API, instead of starting one. Its key is read from ${_KEY_VARIABLE}.",
)
@click.option(
    "--against",
    "peers",
    metavar="[NAME=]URL[#MODEL]",
    multiple=True,
    callback=each_parsed_by(Peer.of),
    help="Take turns with the server at URL, at each level of --concurrency: the scenario peers. May be repeated.",
)
@click.option(
    "--concurrency",
    "concurrencies",
    default="1,2,4",
    show_default=True,
    metavar="N,...",
    callback=parsed_by(levels),
    help="Clients of each level of the sweep; each has one request open at any time.",
)
@click.option(
    "--compare",
    "modes",
    metavar="MODE,...",
    callback=parsed_by(names_of("mode", _MODES, _ALIASES)),
    help=f"Ways to decode, one after the other: {', '.join(_MODES)}.  [default: single]",
)
@click.option(
    "--scenarios",
    "names",
    metavar="NAME,...",
    callback=parsed_by(names_of("scenario", _SCENARIOS)),
    help=f"What to measure: {', '.join(_SCENARIOS)}.  [default: sweep]",
)
@click.option(
    "--report",
    "report_directory",
    type=_file_type,
    metavar="DIR",
    callback=output_directory,
    help="Measure everything that a report from your machine should have, and write report.json and report.html into"
    " DIR. They hold no names, paths, addresses or texts of yours.",
)
@flag("--quick", "With --report: smaller loads, and two architectures.")
@count_options
@flag("--prefix", "Measure the prefix cache: the scenarios prefix and sharing.")
@click.option(
    "--kv",
    "kv_formats",
    metavar="FORMAT,...",
    callback=parsed_by(names_of("format", FORMATS)),
    help="Measure these formats of keys and values: the scenario kv-formats.",
)
@click.option(
    "--experts",
    "expert_shares",
    metavar="SHARE,...",
    callback=parsed_by(shares),
    help="Measure these shares of a model's experts in memory, with the others on disk: the scenario experts."
    " Without MODEL one is generated.",
)
@click.option(
    "--experts-gb",
    default=Plan().experts_gb,
    show_default=True,
    type=click.FloatRange(0.6, 1000),
    help="experts: size of the experts of the generated model, in units of 10^9 bytes.",
)
@click.option(
    "--formats",
    "weight_formats",
    metavar="FORMAT,...",
    callback=parsed_by(names_of("format", WEIGHT_FORMAT_SETTINGS)),
    help="Measure a model in these weight formats: the scenario formats."
    f" There are: {', '.join(WEIGHT_FORMAT_SETTINGS)}.",
)
@click.option(
    "--widths",
    default="1,2,4,8,16",
    show_default=True,
    metavar="N,...",
    callback=parsed_by(levels),
    help="formats: batch widths.",
)
@flag(
    "--vision",
    "Measure images and videos: the scenarios vision-prefix and image-join. Without MODEL a vision model is"
    " generated, and the whole run is of it.",
)
@flag(
    "--speculation",
    "Measure drafts, of one stream and of several: the scenarios speculation and speculation-batched."
    " --speculation-mode says which kind.",
)
@flag("--guarantees", "Measure the scenario guarantees: what machd promises in seconds.")
@flag("--check", "Exit with code 1 if a goal of the run is missed; name each on standard error.")
@click.option(
    "--model-id",
    metavar="NAME",
    help="With --url: which of the server's models; its first one unless given.",
)
@click.option(
    "--extra-body",
    "extra",
    metavar="JSON",
    callback=parsed_by(json_fields),
    help="With --url: fields for every request, such as '{\"ignore_eos\": true}'.",
)
@click.option(
    "--json",
    "json_file",
    type=_file_type,
    callback=output_file,
    help="Write the figures to this file.",
)
@click.option(
    "--plot",
    "plot_file",
    type=_file_type,
    callback=output_file,
    help="Draw the figures into this PNG file; needs matplotlib.",
)
@model_argument
@settings_options
def bench(
    loaded: LoadedSettings,
    /,
    *,
    url: str | None,
    peers: tuple[Peer, ...],
    concurrencies: tuple[int, ...],
    modes: tuple[str, ...] | None,
    names: tuple[str, ...] | None,
    is_prefix: bool,
    kv_formats: tuple[str, ...] | None,
    expert_shares: tuple[float, ...] | None,
    experts_gb: float,
    weight_formats: tuple[str, ...] | None,
    widths: tuple[int, ...],
    is_vision: bool,
    is_speculation: bool,
    is_guarantees: bool,
    is_check: bool,
    is_quick: bool,
    report_directory: Path | None,
    model_id: str | None,
    extra: dict[str, object] | None,
    json_file: Path | None,
    plot_file: Path | None,
    **counts: int,
) -> None:
    """Measure MODEL, or the embedded default, over HTTP and against a bare model loop.

    Starts a server for each mode, sends it streamed completions, and tells latencies and tokens/s.
    In turns with the server it times the bare loop, a forward pass and an argmax and nothing else,
    which is the most that the machine could do. Settings are handed to the server. The mode static
    is mlx-lm's batch_generate without a server.

    --prefix, --kv, --experts, --formats, --vision, --speculation and --guarantees stand for scenarios, and combine with others.
    """
    arguments = forwarded_arguments(loaded)
    if report_directory is not None:
        refuse_other_options(click.get_current_context())
        measure_report(loaded, arguments, report_directory, is_quick=is_quick)
        return
    wanted = {
        *(["peers"] if peers else ()),
        *(names or ()),
        *(_PREFIX if is_prefix else ()),
        *(_VISION if is_vision else ()),
        *(["kv-formats"] if kv_formats else ()),
        *(["experts"] if expert_shares else ()),
        *(["formats"] if weight_formats else ()),
        *(_SPECULATION if is_speculation else ()),
        *(["guarantees"] if is_guarantees else ()),
    } or {"sweep"}
    scenarios = [one for one in _SCENARIOS.values() if one.name in wanted]
    proposer = loaded.settings.speculation.mode
    batches = {"peers", "prefix", "memory", *_VISION, "kv-formats", "experts", "formats"} & {
        one.name for one in scenarios
    }
    compared = [Mode(name) for name in modes or ()] or [Mode.BATCHED if batches else Mode.SINGLE]
    _refuse(
        (
            url is not None and bool(modes or arguments),
            "--url measures a server that runs already: MODEL, --compare and settings are not its",
        ),
        (is_quick, "--quick goes with --report"),
        (
            "peers" in wanted and not peers,
            "peers needs a server to take turns with: --against URL",
        ),
        (
            url is None and (model_id, extra) != (None, None),
            "--model-id and --extra-body are for a server at --url",
        ),
        (
            proposer == OFF and bool(wanted.intersection(_SPECULATION)),
            f"speculation.mode is {OFF}: name what to compare it with, as --speculation-mode ngram",
        ),
        (
            plot_file is not None and not can_plot(),
            f"--plot needs matplotlib: {how_to_install('plot')}",
        ),
        (
            is_check and not any(one.has_goal for one in scenarios),
            "--check needs a goal, and this run has none: add a scenario such as structured",
        ),
    )
    measured = [Mode.REMOTE] if url else [*compared, Mode.SETTINGS, Mode.BARE]
    for one in scenarios:
        able = ", ".join(mode for mode in _MODES if mode in one.modes)
        how = f"--compare {able}" if able else "a server of the bench's own: leave --url out"
        _refuse((not one.modes & set(measured), f"{one.name} needs {how}"))
    clock = SystemClock()
    plan = Plan(
        concurrencies=concurrencies,
        architectures=(),
        peers=peers,
        kv_formats=kv_formats or (),
        expert_shares=expert_shares or (),
        experts_gb=experts_gb,
        weight_formats=weight_formats or (),
        widths=widths,
        speculation_mode=proposer,
        started_unix_s=int(clock.unix_s()),
        **counts,
    )
    console = Console()
    total = sum(one.requests(plan) * len(one.modes & set(measured)) for one in scenarios)
    with CountingBar(total=total) as progress:

        def show(scenario: Scenario, rows: list[Row]) -> None:
            with progress.hidden():
                print_scenario(console, scenario, rows)

        runner = Runner(Bench(plan, clock, progress), scenarios, show)
        if url is not None:
            api_key = process_environ().get(_KEY_VARIABLE)
            report = _run_remote(runner, url, api_key, model_id, extra)
        else:
            is_generated = is_vision and loaded.settings.model.path is None
            with generated_vision_model(progress) if is_generated else nullcontext() as path:
                settings = with_model(loaded.settings, path)
                arguments += [] if path is None else ["--model-path", path]
                report = run_stoppable(runner.measure_modes(compared, settings, arguments))
    print_summary(console, report)
    _write(report, json_file, plot_file)
    _check_measured(runner, report)
    if is_check:
        _tell_goals(report)


def _write(report: Report, json_file: Path | None, plot_file: Path | None) -> None:
    if json_file is not None:
        json_file.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")
    if plot_file is not None and report.rows:
        write_plot(report, plot_file)


def _check_measured(runner: Runner, report: Report) -> None:
    """End with an error where scenarios failed or nothing was measured."""
    if runner.failures:
        failed = ", ".join(failure.partition(":")[0] for failure in runner.failures)
        raise EngineFaultError(f"the server did not get through: {failed}; the notes say why")
    if not report.rows:
        raise EngineFaultError("nothing was measured; the notes say why")


def _run_remote(
    runner: Runner,
    url: str,
    api_key: str | None,
    model_id: str | None,
    extra: dict[str, object] | None,
) -> Report:
    try:
        return run_stoppable(runner.measure_url(url, api_key, model_id, extra))
    except OSError as error:
        reason = error.strerror or str(error) or "no answer in time"
        click.echo(f"machd: {url} does not answer: {reason}", err=True)
        raise click.exceptions.Exit(_NO_SERVER) from None


def _tell_goals(report: Report) -> None:
    """Name each goal that is not reached, or not shown to be; a missed one is exit code 1."""
    for goal in report.goals:
        if goal.verdict is not Verdict.PASS:
            click.echo(f"machd: {goal}", err=True)
    if any(goal.verdict is Verdict.MISSED for goal in report.goals):
        raise click.exceptions.Exit(_GOAL_MISSED)


def _refuse(*problems: tuple[bool, str]) -> None:
    """Raise click.UsageError with the first problem that holds."""
    for holds, message in problems:
        if holds:
            raise click.UsageError(message)


def forwarded_arguments(loaded: LoadedSettings) -> list[str]:
    """The settings file and the settings flags of this command, for a command of the same user.

    What came from variables need not be handed on: the other command sees them itself.
    """
    arguments: list[str] = []
    origins = loaded.origins
    if loaded.config_file is not None:
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
