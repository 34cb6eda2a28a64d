"""Text of the daemon's on a terminal, where it is only ever text.

A model's name, a request id or a message may hold what a stranger wrote: markup of rich's, or the
control characters that move a cursor or colour a screen. All that ``machd ctl`` prints goes through
here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import TypeVar

import click
import msgspec
from msgspec import Struct
from rich.console import Console
from rich.table import Table
from rich.text import Text

from machd.admin.config import ConfigChange
from machd.settings.problems import printable

_S = TypeVar("_S", bound=Struct)

json_option = click.option("--json", "as_json", is_flag=True, help="Print the daemon's answer.")
"""Of every command that shows an answer; see :func:`show_answer`."""


def counted(count: int, noun: str) -> str:
    """A number and what it counts, such as ``1 request`` and ``2 requests``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def plain(text: str, style: str = "") -> Text:
    """A cell of a table that shows just these characters."""
    return Text(printable(text), style=style)


def say(line: str, *, err: bool = False) -> None:
    """Print one line."""
    click.echo(printable(line), err=err)


def say_changed(change: ConfigChange) -> None:
    """Print the settings that a change has changed."""
    say(f"changed {', '.join(change.changed)}" if change.changed else "nothing has changed")


def say_json(answer: object) -> None:
    """Print an answer of the daemon's for a program."""
    click.echo(shown_json(msgspec.json.format(msgspec.json.encode(answer), indent=2).decode()))


def show_answer(answer: _S, show: Callable[[_S], None], *, as_json: bool) -> None:
    """Print an answer for a program, or have ``show`` print it for a person."""
    if as_json:
        say_json(answer)
    else:
        show(answer)


def shown_json(text: str) -> str:
    """The same JSON, with an escape for each character that could garble a terminal."""
    return "".join(
        letter if letter.isprintable() or letter == "\n" else json.dumps(letter)[1:-1]
        for letter in text
    )


def print_lines(lines: Iterable[tuple[str, Text | str]]) -> None:
    """Print a line for each label and text; long ones are folded under themselves."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, style="dim")
    table.add_column(overflow="fold")
    for label, text in lines:
        table.add_row(label, text if isinstance(text, Text) else plain(text))
    click.echo("\n".join(table_lines(table)), color=True)


def table_lines(table: Table) -> list[str]:
    """Render a table; the lines end where their text does."""
    console = Console(highlight=False)
    with console.capture() as written:
        console.print(table)
    # rich fills every line up to the width, which a file or a pipe does not want.
    return [line.rstrip() for line in written.get().splitlines()]
