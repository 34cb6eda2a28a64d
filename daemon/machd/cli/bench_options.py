"""What the flags of ``machd bench`` take, and together: found before a minute of measuring."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import click
import msgspec

from machd.bench.connection import ServerAddress
from machd.bench.modes import CONTINUOUS, MODES, STATIC, Mode, modes_named
from machd.bench.prefix.kv_formats import formats_named
from machd.bench.scenarios import Scenario, scenarios_named

__all__ = [
    "check_prefix",
    "check_scenarios",
    "read_concurrencies",
    "read_fields",
    "read_kv_formats",
    "read_modes",
    "read_output_file",
    "read_scenarios",
    "read_url",
]


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
