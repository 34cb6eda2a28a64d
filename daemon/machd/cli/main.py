"""The ``machd`` command: finds the subcommand, and turns every error into a line and a code."""

from __future__ import annotations

import sys
from importlib import import_module

import click

from machd import __version__
from machd.errors import EngineFaultError, MachdError

__all__ = ["command_line", "main"]

_COMMANDS = {
    "serve": "machd.cli.serve:serve",
    "config": "machd.cli.config:config",
    "model": "machd.cli.model:model",
    "bench": "machd.cli.bench:bench",
    "version": "machd.cli.version:version",
}
"""Where each subcommand is; imported only when it runs, so that help comes at once."""

_INTERRUPTED = 130


class _Commands(click.Group):
    def list_commands(self, _ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, _ctx: click.Context, name: str) -> click.Command | None:
        if name not in _COMMANDS:
            return None
        module, _, attribute = _COMMANDS[name].partition(":")
        command: click.Command = getattr(import_module(module), attribute)
        return command


@click.command(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="machd")
def command_line() -> None:
    """Serve an MLX model over the OpenAI API: one config file, one process."""


def main() -> None:
    """Run the command line; the exit codes are those of the contract."""
    try:
        command_line(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(2)
    except (click.Abort, KeyboardInterrupt):
        sys.exit(_INTERRUPTED)
    except click.exceptions.Exit as error:
        sys.exit(error.exit_code)
    except MachdError as error:
        for line in error.message.splitlines():
            click.echo(f"machd: {line}", err=True)
        if isinstance(error, EngineFaultError) and error.__cause__ is not None:
            click.echo(f"machd: cause: {type(error.__cause__).__name__}", err=True)
        sys.exit(error.exit_code)
