"""The parsers and groups of options of ``machd bench``."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TypeAlias, TypeVar

import click
import msgspec

from machd_bench.bench import Plan
from machd_bench.connection import Address

_Item = TypeVar("_Item")
_Command: TypeAlias = Callable[..., object]
_Decorator: TypeAlias = Callable[[_Command], _Command]

_COUNTS = {
    "requests": (1, "Requests a level, rounded up to as many for every client."),
    "prompt_tokens": (1, "About how long prompts are."),
    "max_tokens": (1, "How long answers are; two make the first time between tokens."),
    "long_prompt_tokens": (1, "long-prompt: how long the prompt is that joins running streams."),
    "prefix_tokens": (2, "prefix: how long prompts are, and the beginning that longer ones share."),
    "users": (2, "sharing: how many ask at once with one system prompt."),
    "system_tokens": (1, "sharing: how long that one is."),
    "image_side": (
        28,
        "vision-prefix: width and height of images in pixels; videos have half of it.",
    ),
    "peer_rounds": (1, "--against: how often each server is asked, at each number of streams."),
    "speculation_tokens": (16, "speculation: how long answers are."),
    "speculation_rounds": (1, "speculation: how often each prompt is asked; goals need three."),
}
"""Whole numbers of a plan, the least of each, and what they are."""


def count_options(command: _Command) -> _Command:
    """Add an option for each whole number of a plan."""
    plan = Plan()
    for name, (least, text) in reversed(_COUNTS.items()):
        spelling, default = f"--{name.replace('_', '-')}", getattr(plan, name)
        kind = click.IntRange(least)
        command = click.option(spelling, default=default, show_default=True, type=kind, help=text)(
            command
        )
    return command


def flag(name: str, text: str) -> _Decorator:
    """An option without a value; ``--name`` is the argument ``is_name``."""
    return click.option(name, f"is_{name[2:]}", is_flag=True, help=text)


def parsed_by(
    parse: Callable[[str], _Item],
) -> Callable[[click.Context, click.Parameter, str | None], _Item | None]:
    """Make a callback of a parser that raises ValueError."""

    def read(_ctx: click.Context, _param: click.Parameter, text: str | None) -> _Item | None:
        try:
            return None if text is None else parse(text)
        except ValueError as error:
            raise click.BadParameter(str(error)) from None

    return read


def each_parsed_by(
    parse: Callable[[str], _Item],
) -> Callable[[click.Context, click.Parameter, tuple[str, ...]], tuple[_Item, ...]]:
    """Make a callback of an option that may be repeated, of a parser that raises ValueError."""

    def read(
        _ctx: click.Context, _param: click.Parameter, texts: tuple[str, ...]
    ) -> tuple[_Item, ...]:
        try:
            return tuple(map(parse, texts))
        except ValueError as error:
            raise click.BadParameter(str(error)) from None

    return read


def levels(text: str) -> tuple[int, ...]:
    """Parse positive whole numbers, each of them once; ValueError for anything else."""
    counts = [int(part) if part.strip().isdecimal() else 0 for part in text.split(",")]
    if min(counts) < 1:
        raise ValueError(f"{text!r} is not a list of positive numbers such as 1,2,4")
    return tuple(dict.fromkeys(counts))


def shares(text: str) -> tuple[float, ...]:
    """Parse numbers above 0 and up to 1, each of them once; ValueError for anything else."""
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(0 < share <= 1 for share in found):
        raise ValueError(f"{text!r} is not a list of shares such as 0.25,0.5,1")
    return tuple(dict.fromkeys(found))


def names_of(
    kind: str, known: Iterable[str], aliases: Mapping[str, str] = MappingProxyType({})
) -> Callable[[str], tuple[str, ...]]:
    """Make a parser of lists of known names; an unknown one is a ValueError that lists them."""

    def parse(text: str) -> tuple[str, ...]:
        words = (part.strip() for part in text.split(","))
        names = tuple(dict.fromkeys(aliases.get(one, one) for one in words))
        for name in names:
            if name not in known:
                raise ValueError(f"{name!r} is no {kind}; there are: {', '.join(known)}")
        return names

    return parse


def output_file(_ctx: click.Context, _param: click.Parameter, path: Path | None) -> Path | None:
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


def output_directory(
    _ctx: click.Context, _param: click.Parameter, path: Path | None
) -> Path | None:
    """Make the folder now, as for a file."""
    if path is not None:
        output_file(_ctx, _param, path / "report.json")
    return path


def server_url(text: str) -> str:
    """Return the text as it is; ValueError if it is no http or https URL."""
    Address.of(text)
    return text


def json_fields(text: str) -> dict[str, object]:
    """Parse a JSON object; ValueError for anything else."""
    try:
        return msgspec.json.decode(text, type=dict[str, object])
    except msgspec.DecodeError as error:
        raise ValueError(f"{text!r} is not a JSON object: {error}") from None
