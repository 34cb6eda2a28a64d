"""What the flags of ``machd bench`` take, and together: found before a minute of measuring."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import click
import msgspec

from machd.bench.connection import ServerAddress
from machd.bench.goals import has_goals
from machd.bench.modes import CONTINUOUS, MODES, STATIC, Mode, modes_named
from machd.bench.prefix.kv_formats import KV_STREAMS, formats_named
from machd.bench.prefix.plan import PrefixPlan
from machd.bench.prefix.sharing import SharedPrompt
from machd.bench.scenarios import Scenario, scenarios_named
from machd.bench.speculation.plan import LEAST_JUDGED_ROUNDS, SpeculationPlan
from machd.bench.speculation.run import OFF

_Command = TypeVar("_Command", bound=Callable[..., None])


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


def read_modes(_ctx: click.Context, _param: click.Parameter, text: str | None) -> tuple[Mode, ...]:
    """Modes by their names."""
    if text is None:
        return ()
    try:
        return modes_named(part.strip() for part in text.split(","))
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def read_scenarios(_ctx: click.Context, _param: click.Parameter, text: str) -> tuple[Scenario, ...]:
    """Scenarios by their names."""
    try:
        return scenarios_named(part.strip() for part in text.split(","))
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


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


def read_kv_formats(
    _ctx: click.Context, _param: click.Parameter, text: str | None
) -> tuple[str, ...]:
    """Formats of keys and values by their names."""
    if text is None:
        return ()
    try:
        return formats_named(part.strip() for part in text.split(","))
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def check_prefix(
    is_prefix: bool,
    scenarios: Sequence[Scenario],
    modes: Sequence[Mode],
    kv_formats: Sequence[str],
) -> None:
    """Whether ``--prefix`` and ``--kv`` can be measured so."""
    if not is_prefix:
        raise click.UsageError("--kv belongs to --prefix")
    if tuple(scenarios) != (Scenario.SWEEP,):
        raise click.UsageError("--prefix has no scenarios: leave --scenarios out")
    if STATIC in modes:
        raise click.UsageError("--prefix needs servers: the mode static has none")
    if kv_formats and CONTINUOUS not in modes:
        raise click.UsageError(
            f"--kv needs a server of the bench's own: --compare {CONTINUOUS.name}"
        )


def check_scenarios(scenarios: Sequence[Scenario], modes: Sequence[Mode]) -> None:
    """Whether each scenario has a mode that it can be measured with."""
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
    """Whether ``--speculation`` can be measured so.

    Args:
        mode: Value of ``speculation.mode``.
        modes: What ``--compare`` names.
        scenarios: What ``--scenarios`` names.
        url: A server that runs already.
        has_prefix: Whether the prefix cache is to be measured, too.
    """
    if has_prefix:
        raise click.UsageError("--speculation and --prefix measure different things: name one")
    if url is not None:
        raise click.UsageError(
            "--speculation needs two daemons of the bench's own: leave --url out"
        )
    if modes:
        raise click.UsageError(
            "--speculation compares with and without guesses: leave --compare out"
        )
    if tuple(scenarios) != (Scenario.SWEEP,):
        raise click.UsageError("--speculation has no scenarios: leave --scenarios out")
    if mode == OFF:
        raise click.UsageError(
            f"speculation.mode is {OFF}, with which --speculation compares: name another, such as"
            " --speculation-mode ngram"
        )


def check_guarantees(
    modes: Sequence[Mode], scenarios: Sequence[Scenario], url: str | None, *, has_others: bool
) -> None:
    """Refuse what ``--guarantees`` cannot be combined with.

    Args:
        modes: What ``--compare`` names.
        scenarios: What ``--scenarios`` names.
        url: A server that runs already.
        has_others: Whether ``--prefix``, ``--kv`` or ``--speculation`` is there, too.
    """
    if has_others:
        raise click.UsageError(
            "--guarantees measures neither the prefix cache nor speculation: name one of them"
        )
    if url is not None:
        raise click.UsageError("--guarantees stops daemons of the bench's own: leave --url out")
    if modes:
        raise click.UsageError("--guarantees compares no modes: leave --compare out")
    if tuple(scenarios) != (Scenario.SWEEP,):
        raise click.UsageError("--guarantees has no scenarios: leave --scenarios out")


def check_goals(scenarios: Sequence[Scenario], modes: Sequence[Mode]) -> None:
    """Refuse ``--check`` for a run of scenarios that has no goal."""
    if not has_goals(scenarios, modes):
        raise click.UsageError(
            "--check needs a goal, and this run has none: add --guarantees, --prefix,"
            " --speculation or a scenario with a goal, such as --scenarios structured"
        )


def prefix_options(command: _Command) -> _Command:
    """What there is for ``--prefix``."""
    for option in reversed(_PREFIX_OPTIONS):
        command = option(command)
    return command


def speculation_options(command: _Command) -> _Command:
    """What there is for ``--speculation``; who guesses is a setting."""
    for option in reversed(_SPECULATION_OPTIONS):
        command = option(command)
    return command


guarantees_option = click.option(
    "--guarantees",
    "is_guarantees",
    is_flag=True,
    help="Measure what machd promises in seconds instead: health under bad requests, refusals,"
    " a cancelled stream, SIGTERM. Takes minutes.",
)

_PREFIX_OPTIONS = (
    click.option(
        "--prefix",
        "is_prefix",
        is_flag=True,
        help="Measure the prefix cache instead: what it finds, what it saves, what it costs.",
    ),
    click.option(
        "--prefix-tokens",
        default=PrefixPlan().tokens,
        show_default=True,
        type=click.IntRange(2),
        help="With --prefix: how long prompts are, and the beginning that longer ones share.",
    ),
    click.option(
        "--users",
        default=SharedPrompt().users,
        show_default=True,
        type=click.IntRange(2),
        help="With --prefix: how many ask at once with one system prompt.",
    ),
    click.option(
        "--system-tokens",
        default=SharedPrompt().system_tokens,
        show_default=True,
        type=click.IntRange(1),
        help="With --prefix: how long that one is.",
    ),
    click.option(
        "--kv",
        "kv_formats",
        metavar="FORMAT,...",
        callback=read_kv_formats,
        help=f"With --prefix: compare formats of keys and values with {KV_STREAMS} streams, such as"
        " none,affine8. Takes minutes.",
    ),
)

_SPECULATION_OPTIONS = (
    click.option(
        "--speculation",
        "is_speculation",
        is_flag=True,
        help="Measure guessing ahead instead, against a daemon that does not: texts to quote,"
        " texts to correct, free prose. Takes minutes; --speculation-mode says who guesses.",
    ),
    click.option(
        "--speculation-tokens",
        default=SpeculationPlan().tokens,
        show_default=True,
        type=click.IntRange(16),
        help="With --speculation: how long answers are.",
    ),
    click.option(
        "--speculation-rounds",
        default=SpeculationPlan().rounds,
        show_default=True,
        type=click.IntRange(1),
        help="With --speculation: how often each prompt is asked of both;"
        f" goals are judged from {LEAST_JUDGED_ROUNDS} on.",
    ),
)
