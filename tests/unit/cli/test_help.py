"""The command line explains itself on a screen of 80 columns."""

from __future__ import annotations

from collections.abc import Iterator

import click
import pytest
from click.testing import CliRunner

from machd.cli.bench_options import names_of
from machd.cli.commands import command_line
from machd.cli.ctl import ctl
from machd.cli.options import SettingsCommand


def _commands(
    command: click.Command = command_line, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    yield path, command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None
            yield from _commands(inner, (*path, name))


COMMANDS = dict(_commands())
GROUPS = [path for path, command in COMMANDS.items() if isinstance(command, click.Group)]


def _run(*arguments: str) -> str:
    return CliRunner().invoke(command_line, arguments, terminal_width=80).output


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_help_fits_the_terminal(path: tuple[str, ...]) -> None:
    """No line is wider than 80 columns, no summary is cut off, and no help is longer than two screens."""
    lines = _run(*path, "--help").splitlines()

    assert max(map(len, lines)) <= 80
    summaries = lines[lines.index("Commands:") :] if "Commands:" in lines else []
    assert not [line for line in summaries if line.endswith("...")]
    assert len(lines) <= 90


@pytest.mark.parametrize(
    "path",
    [path for path, one in COMMANDS.items() if isinstance(one, SettingsCommand)],
    ids=" ".join,
)
def test_the_whole_help_has_every_option(path: tuple[str, ...]) -> None:
    """Options that the short help leaves out are in --help-all, which it names."""
    command = COMMANDS[path]
    whole = _run(*path, "--help-all")

    assert "--help-all" in _run(*path, "--help")
    for param in command.get_params(click.Context(command)):
        if isinstance(param, click.Option):
            assert param.opts[0] in whole


@pytest.mark.parametrize("path", GROUPS, ids=" ".join)
def test_a_misspelt_command_is_answered_with_the_one_it_is_like(path: tuple[str, ...]) -> None:
    """At every level, the top one too."""
    group = COMMANDS[path]
    assert isinstance(group, click.Group)
    for name in group.list_commands(click.Context(group)):
        misspelt = name[:-1] + "x" + name[-1]
        assert f"'{name}'" in _run(*path, misspelt)


def test_continuous_is_another_word_for_batched() -> None:
    """One mode has one name; the word of its settings is understood wherever the name is."""
    mode = ctl.commands["mode"]
    (argument,) = [one for one in mode.params if isinstance(one, click.Argument)]
    context = click.Context(mode)

    assert argument.process_value(context, "continuous") == "batched"
    assert names_of("mode", ["batched"], {"continuous": "batched"})("continuous,batched") == (
        "batched",
    )
