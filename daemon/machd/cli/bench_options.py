"""What the flags of ``machd bench`` take, and together: found before a minute of measuring."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeAlias, TypeVar

import click
import msgspec

from machd.bench.connection import ServerAddress
from machd.bench.goals import has_goals
from machd.bench.modes import CONTINUOUS, MODES, STATIC, Mode, modes_named
from machd.bench.plot import can_plot
from machd.bench.prefix.kv_formats import KV_STREAMS, formats_named
from machd.bench.prefix.plan import PrefixPlan
from machd.bench.prefix.sharing import SharedPrompt
from machd.bench.scenarios import Scenario, scenarios_named
from machd.bench.speculation.plan import LEAST_JUDGED_ROUNDS, SpeculationPlan
from machd.bench.speculation.run import OFF

_Item = TypeVar("_Item")
_Command: TypeAlias = Callable[..., object]
_Decorator: TypeAlias = Callable[[_Command], _Command]
_ReadNames: TypeAlias = Callable[[click.Context, click.Parameter, str | None], tuple[_Item, ...]]


def read_concurrencies(_ctx: click.Context, _param: click.Parameter, text: str) -> tuple[int, ...]:
    """Levels of the sweep, each once."""
    try:
        levels = tuple(int(part) for part in text.split(","))
    except ValueError:
        levels = ()
    if not levels or min(levels) < 1:
        raise click.BadParameter(f"{text!r} is not a list of positive numbers such as 1,2,4")
    return tuple(dict.fromkeys(levels))


def read_url(_ctx: click.Context, _param: click.Parameter, url: str | None) -> str | None:
    """A URL that a server of this API can have."""
    try:
        if url is not None:
            ServerAddress.of(url)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None
    return url


def read_fields(
    _ctx: click.Context, _param: click.Parameter, text: str | None
) -> dict[str, object] | None:
    """A JSON object."""
    try:
        return None if text is None else msgspec.json.decode(text, type=dict[str, object])
    except msgspec.DecodeError as error:
        raise click.BadParameter(f"{text!r} is not a JSON object: {error}") from None


def read_output_file(
    _ctx: click.Context, _param: click.Parameter, path: Path | None
) -> Path | None:
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


def _names_reader(parse: Callable[[Iterable[str]], tuple[_Item, ...]]) -> _ReadNames[_Item]:
    """Make a callback that reads a list of names; nothing given is an empty list."""

    def read(_ctx: click.Context, _param: click.Parameter, text: str | None) -> tuple[_Item, ...]:
        try:
            return () if text is None else parse(part.strip() for part in text.split(","))
        except ValueError as error:
            raise click.BadParameter(str(error)) from None

    return read


read_modes = _names_reader(modes_named)
read_scenarios = _names_reader(scenarios_named)


def check_url(url: str | None, hints: Sequence[object], *, has_own: bool) -> None:
    """Refuse ``--url`` with what describes a server of the bench's own, and its hints without it."""
    _refuse(
        (
            url is not None and has_own,
            "--url measures a server that runs already: MODEL, --compare and settings are not its",
        ),
        (
            url is None and any(hint is not None for hint in hints),
            "--model-id and --extra-body are for a server at --url",
        ),
    )


def check_measured(
    modes: Sequence[Mode],
    scenarios: Sequence[Scenario],
    kv_formats: Sequence[str],
    *,
    is_prefix: bool,
) -> None:
    """Refuse ``--prefix``, ``--kv`` or scenarios that these modes cannot be measured with."""
    if is_prefix or kv_formats:
        _refuse(
            (not is_prefix, "--kv belongs to --prefix"),
            _scenarios_problem("--prefix", scenarios),
            (STATIC in modes, "--prefix needs servers: the mode static has none"),
            (
                bool(kv_formats) and CONTINUOUS not in modes,
                f"--kv needs a server of the bench's own: --compare {CONTINUOUS.name}",
            ),
        )
        return
    for scenario in scenarios:
        if not any(scenario in mode.scenarios for mode in modes):
            able = ", ".join(mode.name for mode in MODES if scenario in mode.scenarios)
            raise click.UsageError(f"{scenario.value} needs a mode that batches: --compare {able}")


def check_speculation(
    mode: str,
    modes: Sequence[Mode],
    scenarios: Sequence[Scenario],
    url: str | None,
    *,
    has_prefix: bool,
) -> None:
    """Refuse what ``--speculation`` cannot be combined with; ``mode`` is ``speculation.mode``."""
    _refuse(
        (has_prefix, "--speculation and --prefix measure different things: name one"),
        (url is not None, "--speculation needs two daemons of the bench's own: leave --url out"),
        (bool(modes), "--speculation compares with and without guesses: leave --compare out"),
        _scenarios_problem("--speculation", scenarios),
        (
            mode == OFF,
            (
                f"speculation.mode is {OFF}, with which --speculation compares: name another,"
                " such as --speculation-mode ngram"
            ),
        ),
    )


def check_guarantees(
    modes: Sequence[Mode], scenarios: Sequence[Scenario], url: str | None, *, has_others: bool
) -> None:
    """Refuse what ``--guarantees`` cannot be combined with."""
    _refuse(
        (
            has_others,
            "--guarantees measures neither the prefix cache nor speculation: name one of them",
        ),
        (url is not None, "--guarantees stops daemons of the bench's own: leave --url out"),
        (bool(modes), "--guarantees compares no modes: leave --compare out"),
        _scenarios_problem("--guarantees", scenarios),
    )


def check_goals(scenarios: Sequence[Scenario], modes: Sequence[Mode]) -> None:
    """Refuse ``--check`` for a run of scenarios that has no goal."""
    if not has_goals(scenarios, modes):
        raise click.UsageError(
            "--check needs a goal, and this run has none: add --guarantees, --prefix,"
            " --speculation or a scenario with a goal, such as --scenarios structured"
        )


def check_plot(
    plot_file: Path | None, scenarios: Sequence[Scenario], *, is_guarantees: bool
) -> None:
    """Refuse ``--plot`` for a run that it cannot draw."""
    if plot_file is None:
        return
    _refuse(
        (is_guarantees, "--guarantees has no plot: leave --plot out"),
        (not can_plot(), "--plot needs matplotlib: pip install 'machd[plot]'"),
        (
            Scenario.SWEEP not in scenarios,
            "--plot draws the sweep, which is not among the scenarios",
        ),
    )


def _scenarios_problem(flag: str, scenarios: Sequence[Scenario]) -> tuple[bool, str]:
    has_any = tuple(scenarios) != (Scenario.SWEEP,)
    return has_any, f"{flag} has no scenarios: leave --scenarios out"


def _refuse(*problems: tuple[bool, str]) -> None:
    """Raise the first problem that holds.

    Raises:
        click.UsageError: One does.
    """
    for holds, message in problems:
        if holds:
            raise click.UsageError(message)


def count_option(flag: str, default: int, text: str, *, least: int = 1) -> _Decorator:
    """Make an option for a whole number that is at least ``least``."""
    return click.option(
        flag, default=default, show_default=True, type=click.IntRange(least), help=text
    )


def _together(*options: _Decorator) -> _Decorator:
    """Make one decorator of several options, which are shown in this order."""

    def add(command: _Command) -> _Command:
        for option in reversed(options):
            command = option(command)
        return command

    return add


prefix_options = _together(
    click.option(
        "--prefix",
        "is_prefix",
        is_flag=True,
        help="Measure the prefix cache instead: what it finds, what it saves, what it costs.",
    ),
    count_option(
        "--prefix-tokens",
        PrefixPlan().tokens,
        "With --prefix: how long prompts are, and the beginning that longer ones share.",
        least=2,
    ),
    count_option(
        "--users",
        SharedPrompt().users,
        "With --prefix: how many ask at once with one system prompt.",
        least=2,
    ),
    count_option(
        "--system-tokens", SharedPrompt().system_tokens, "With --prefix: how long that one is."
    ),
    click.option(
        "--kv",
        "kv_formats",
        metavar="FORMAT,...",
        callback=_names_reader(formats_named),
        help=f"With --prefix: compare formats of keys and values with {KV_STREAMS} streams, such as"
        " none,affine8. Takes minutes.",
    ),
)

speculation_options = _together(
    click.option(
        "--speculation",
        "is_speculation",
        is_flag=True,
        help="Measure guessing ahead instead, against a daemon that does not: texts to quote,"
        " texts to correct, free prose. Takes minutes; --speculation-mode says who guesses.",
    ),
    count_option(
        "--speculation-tokens",
        SpeculationPlan().tokens,
        "With --speculation: how long answers are.",
        least=16,
    ),
    count_option(
        "--speculation-rounds",
        SpeculationPlan().rounds,
        "With --speculation: how often each prompt is asked of both;"
        f" goals are judged from {LEAST_JUDGED_ROUNDS} on.",
    ),
)

guarantees_option = click.option(
    "--guarantees",
    "is_guarantees",
    is_flag=True,
    help="Measure what machd promises in seconds instead: health under bad requests, refusals,"
    " a cancelled stream, SIGTERM. Takes minutes.",
)
