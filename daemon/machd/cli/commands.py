"""The subcommands of ``machd``: finds the one to run, and turns every error into a line and a code."""

from __future__ import annotations

import os
import sys
import threading
from importlib import import_module

import click
import structlog
from click.shell_completion import CompletionItem

from machd import __version__
from machd.errors import MachdError

_COMMANDS = {
    "serve": "machd.cli.serve:serve",
    "check": "machd.cli.check:check",
    "config": "machd.cli.config:config",
    "model": "machd.cli.model:model",
    "bench": "machd.cli.bench:bench",
    "ctl": "machd.cli.ctl:ctl",
    "install-service": "machd.cli.install_service:install_service",
    "completion": "machd.cli.completion:completion",
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

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Name the commands that a misspelt one is like; click knows those of imported commands only."""
        try:
            return super().resolve_command(ctx, args)
        except click.exceptions.NoSuchCommand as error:
            raise click.exceptions.NoSuchCommand(
                error.command_name, possibilities=_COMMANDS, ctx=ctx
            ) from None

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete the names of subcommands without importing them, which takes longer than a key press."""
        names = [CompletionItem(name) for name in _COMMANDS if name.startswith(incomplete)]
        return [*names, *click.Command.shell_complete(self, ctx, incomplete)]


@click.command(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="machd")
def command_line() -> None:
    """Serve an MLX model over the OpenAI API: one config file, one address."""


def run() -> int:
    """Run the subcommand that the process's arguments name, and return the exit code."""
    # What a command prints is its answer; a warning beside it belongs elsewhere. `serve` does more.
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    try:
        # Outside of its standalone mode click returns the code of ctx.exit() and raises nothing.
        exit_code = command_line(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return 2
    except (click.Abort, KeyboardInterrupt):
        return _INTERRUPTED
    except MachdError as error:
        for line in error.message.splitlines():
            click.echo(f"machd: {_printable(line)}", err=True)
        return error.exit_code
    return exit_code if isinstance(exit_code, int) else 0


def _printable(line: str) -> str:
    """Without control characters: a message may quote a model's files, which a stranger wrote."""
    return "".join(character if character.isprintable() else "?" for character in line)


def leave(exit_code: int) -> None:
    """Exit, even while a thread is inside native code or a system call that never returns.

    A model that is still loading is such a thread; unwinding Python under it would abort the
    process with a core dump instead of the exit code. mlx has threads of its own, which Python does
    not list: on a machine with far too much to do a stop was seen to end that way. A worker that
    reads from a dead file system would be waited for.
    """
    has_native_threads = "mlx.core" in sys.modules
    if has_native_threads or threading.active_count() > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)
    sys.exit(exit_code)
