"""``machd bench``: how fast a server is, and how fast it could be."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine, Sequence
from pathlib import Path

import click
import msgspec
from rich.console import Console

from machd.bench.connection import ServerAddress
from machd.bench.long_prompt import LongPromptLoad
from machd.bench.modes import MODES, REMOTE, Mode, modes_named
from machd.bench.plan import BenchPlan
from machd.bench.plot import can_plot, write_plot
from machd.bench.progress import BenchProgress
from machd.bench.report import BenchReport
from machd.bench.run import Bench
from machd.bench.scenarios import Scenario, scenarios_named
from machd.bench.table import print_report
from machd.bench.target import TargetHints
from machd.bench.workload import Workload
from machd.cli.options import SettingsCommand, model_argument, settings_options
from machd.clock import SystemClock
from machd.settings.keys import setting_keys
from machd.settings.layers import OriginKind
from machd.settings.sources import LoadedSettings, process_environ

__all__ = ["bench"]

_NO_SERVER = 69
_KEY_VARIABLE = "OPENAI_API_KEY"


def _concurrencies(_ctx: click.Context, _param: click.Parameter, text: str) -> tuple[int, ...]:
    try:
        levels = tuple(int(part) for part in text.split(","))
    except ValueError:
        levels = ()
    if not levels or min(levels) < 1:
        raise click.BadParameter(f"{text!r} is not a list of positive numbers such as 1,2,4")
    return tuple(dict.fromkeys(levels))


def _url(_ctx: click.Context, _param: click.Parameter, url: str | None) -> str | None:
    try:
        if url is not None:
            ServerAddress.of(url)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None
    return url


def _modes(_ctx: click.Context, _param: click.Parameter, text: str | None) -> tuple[Mode, ...]:
    if text is None:
        return ()
    try:
        return modes_named(part.strip() for part in text.split(","))
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def _scenarios(_ctx: click.Context, _param: click.Parameter, text: str) -> tuple[Scenario, ...]:
    try:
        return scenarios_named(part.strip() for part in text.split(","))
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def _fields(
    _ctx: click.Context, _param: click.Parameter, text: str | None
) -> dict[str, object] | None:
    try:
        return None if text is None else msgspec.json.decode(text, type=dict[str, object])
    except msgspec.DecodeError as error:
        raise click.BadParameter(f"{text!r} is not a JSON object: {error}") from None


def _output_file(_ctx: click.Context, _param: click.Parameter, path: Path | None) -> Path | None:
    """Make the folder now: a minute of measuring should not end in an error."""
    if path is None:
        return None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise click.BadParameter(f"cannot make {path.parent}: {error.strerror}") from None
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise click.BadParameter(f"{path} cannot be written")
    return path


_file_type = click.Path(path_type=Path)


@click.command(cls=SettingsCommand)
@click.option(
    "--url",
    metavar="URL",
    callback=_url,
    help="Measure the server at URL, machd or another of the"
    f" OpenAI API, instead of starting one. Its key is read from ${_KEY_VARIABLE}.",
)
@click.option(
    "--concurrency",
    "concurrencies",
    default="1,2,4",
    show_default=True,
    metavar="N,...",
    callback=_concurrencies,
    help="Clients of each level of the sweep; each has one request open at any time.",
)
@click.option(
    "--requests",
    default=8,
    show_default=True,
    type=click.IntRange(1),
    help="Requests a level, rounded up to as many for every client.",
)
@click.option(
    "--prompt-tokens",
    default=128,
    show_default=True,
    type=click.IntRange(1),
    help="About how long prompts are.",
)
@click.option(
    "--max-tokens",
    default=64,
    show_default=True,
    type=click.IntRange(1),
    help="How long answers are; two make the first time between tokens.",
)
@click.option(
    "--compare",
    "modes",
    metavar="MODE,...",
    callback=_modes,
    help="Ways to decode, one after the other:"
    f" {', '.join(mode.name for mode in MODES)}.  [default: {MODES[0].name}]",
)
@click.option(
    "--scenarios",
    default=Scenario.SWEEP.value,
    show_default=True,
    metavar="NAME,...",
    callback=_scenarios,
    help=f"What to measure: {', '.join(Scenario)}.",
)
@click.option(
    "--long-prompt-tokens",
    default=LongPromptLoad().prompt_tokens,
    show_default=True,
    type=click.IntRange(1),
    help="About how long the prompt is that joins running streams.",
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
    callback=_fields,
    help="With --url: fields for every request, such as '{\"ignore_eos\": true}'.",
)
@click.option(
    "--json",
    "json_file",
    type=_file_type,
    callback=_output_file,
    help="Write the figures to this file.",
)
@click.option(
    "--plot",
    "plot_file",
    type=_file_type,
    callback=_output_file,
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
    """
    arguments = forwarded_arguments(loaded)
    hints = (model_id, extra)
    if url is not None and (modes or arguments):
        raise click.UsageError(
            "--url measures a server that runs already: MODEL, --compare and settings are not its"
        )
    if url is None and any(hint is not None for hint in hints):
        raise click.UsageError("--model-id and --extra-body are for a server at --url")
    modes = modes or MODES[:1]
    _check_scenarios(scenarios, (REMOTE,) if url else modes)
    if plot_file is not None and not can_plot():
        raise click.UsageError("--plot needs matplotlib: pip install 'machd[plot]'")
    if plot_file is not None and Scenario.SWEEP not in scenarios:
        raise click.UsageError("--plot draws the sweep, which is not among the scenarios")
    clock = SystemClock()
    workload = Workload(requests, prompt_tokens, max_tokens, seed=int(clock.unix_s()))
    plan = BenchPlan(
        workload,
        concurrencies,
        scenarios,
        long_prompt=LongPromptLoad(prompt_tokens=long_prompt_tokens),
    )
    with BenchProgress() as progress:
        run = Bench(plan, clock=clock, progress=progress)
        if url is None:
            report = asyncio.run(run.measure_modes(modes, arguments))
        else:
            api_key = process_environ().get(_KEY_VARIABLE)
            report = _run_remote(
                run.measure_url(url, TargetHints(api_key, model_id, extra or {})), url
            )
    print_report(report, Console())
    if json_file is not None:
        json_file.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")
    if plot_file is not None:
        write_plot(report, plot_file)


def _check_scenarios(scenarios: Sequence[Scenario], modes: Sequence[Mode]) -> None:
    for scenario in scenarios:
        if not any(scenario in mode.scenarios for mode in modes):
            able = ", ".join(mode.name for mode in MODES if scenario in mode.scenarios)
            raise click.UsageError(f"{scenario.value} needs a mode that batches: --compare {able}")


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


def _run_remote(measurement: Coroutine[object, object, BenchReport], url: str) -> BenchReport:
    try:
        return asyncio.run(measurement)
    except OSError as error:
        reason = error.strerror or str(error) or "no answer in time"
        click.echo(f"machd: {url} does not answer: {reason}", err=True)
        raise click.exceptions.Exit(_NO_SERVER) from None
