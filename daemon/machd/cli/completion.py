"""``machd completion``: what makes a shell complete machd's commands and options."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import click
from click.shell_completion import get_completion_class

from machd.errors import StartupError
from machd.settings.sources import process_environ

Shell = Literal["bash", "zsh", "fish"]

_VARIABLE = "_MACHD_COMPLETE"
"""The variable by which click's scripts ask the program for completions."""

_ZSH_START = "(( $+functions[compdef] )) || { autoload -Uz compinit && compinit }\n"
"""The script registers itself with zsh's completion system, which a plain ``.zshrc`` does not start."""


@click.command(short_help="Complete commands and options in bash, zsh or fish.")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.option("--install", is_flag=True, help="Write it where the shell finds it, for this user.")
@click.pass_context
def completion(ctx: click.Context, shell: Shell, *, install: bool) -> None:
    """Print the script that completes machd's commands and options in SHELL, or install it.

    bash finds the installed file through the package bash-completion, fish by itself. For zsh a line is added to
    .zshrc, once. New shells complete.
    """
    script = completion_script(shell, ctx.find_root().command)
    if not install:
        click.echo(script)
        return
    environ = process_environ()
    path = script_path(shell, environ)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(script, "utf-8")
        click.echo(f"Wrote {path}")
        if shell == "zsh":
            _source_in_zshrc(path, environ)
    except OSError as error:
        raise StartupError(
            f"{error.filename or path} cannot be written: {error.strerror}; `machd completion {shell}` prints the "
            "script, to put it elsewhere"
        ) from error
    click.echo("New shells complete machd.")


def completion_script(shell: Shell, command: click.Command) -> str:
    """Return the script by which ``shell`` asks ``command`` for completions."""
    shell_class = get_completion_class(shell)
    assert shell_class is not None, "click knows the three"
    script = shell_class(command, {}, "machd", _VARIABLE).source()
    return _ZSH_START + script if shell == "zsh" else script


def script_path(shell: Shell, environ: Mapping[str, str]) -> Path:
    """Return where the user's shell looks for the script; for zsh a place that ``.zshrc`` is to name."""
    data = Path(environ.get("XDG_DATA_HOME") or _home(environ) / ".local" / "share")
    match shell:
        case "bash":
            return data / "bash-completion" / "completions" / "machd"
        case "zsh":
            return data / "machd" / "completion.zsh"
        case "fish":
            config = Path(environ.get("XDG_CONFIG_HOME") or _home(environ) / ".config")
            return config / "fish" / "completions" / "machd.fish"


def _source_in_zshrc(path: Path, environ: Mapping[str, str]) -> None:
    """Add the line that reads the script to the user's ``.zshrc``, unless it is there."""
    startup = Path(environ.get("ZDOTDIR") or _home(environ)) / ".zshrc"
    line = f"source {shlex.quote(str(path))}"
    text = startup.read_text("utf-8", errors="replace") if startup.exists() else ""
    if line in text.splitlines():
        return
    with startup.open("a", encoding="utf-8") as file:
        file.write(f"{'' if text.endswith(chr(10)) or not text else chr(10)}{line}\n")
    click.echo(f"Added to {startup}: {line}")


def _home(environ: Mapping[str, str]) -> Path:
    home = environ.get("HOME")
    if not home:
        raise StartupError("HOME is not set, so this user has no place for completions")
    return Path(home)
