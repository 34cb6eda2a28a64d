"""``machd config``: look at settings, check them, and get a file to start from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import click

from machd.cli.options import SettingsCommand, settings_options
from machd.errors import SettingsError
from machd.settings.explain import (
    settings_example,
    settings_json,
    settings_schema,
    settings_toml,
)
from machd.settings.model import Settings
from machd.settings.problems import shortened
from machd.settings.sources import LoadedSettings, load_settings, process_environ


@click.group()
def config() -> None:
    """Show, check and write settings."""


@config.command(cls=SettingsCommand)
@click.option("--origins", is_flag=True, help="Say where each value came from.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of TOML.")
@settings_options
def show(loaded: LoadedSettings, *, origins: bool, as_json: bool) -> None:
    """Print the settings in force as TOML.

    Give it the options that you would give to serve. The text can be used as a settings file;
    secrets are masked in it.
    """
    if as_json:
        _echo_json(settings_json(loaded, origins=origins))
    else:
        click.echo(settings_toml(loaded, origins=origins), nl=False)


@config.command(short_help="Check a settings file, the variables and the key files.")
@click.argument("file", required=False, type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@click.pass_context
def check(ctx: click.Context, file: Path | None, *, as_json: bool) -> None:
    """Check FILE and the LME_ variables for problems, and the key files that they name.

    Prints every problem and exits with 2 if there is one. Without FILE, the file that serve would
    read is checked.
    """
    environ = process_environ()
    try:
        loaded = load_settings(config_path=file, environ=environ, flags={})
        _check_files(loaded.settings, environ)
    except SettingsError as error:
        if not as_json:
            raise
        _echo_json({"ok": False, "problems": error.problems})
        ctx.exit(error.exit_code)
    if as_json:
        _echo_json({"ok": True, "problems": []})
    elif loaded.config_file is None:
        click.echo("OK: no settings file, just defaults and variables")
    else:
        click.echo(f"OK: {click.format_filename(loaded.config_file)}")
    for given, now in () if as_json else loaded.renamed.items():
        click.echo(f"{given}: has become {now}; both names work")


@config.command()
@click.argument("path", required=False, default="machd.toml", type=click.Path(path_type=Path))
@click.option("--force", is_flag=True, help="Overwrite PATH if it is there.")
def init(path: Path, *, force: bool) -> None:
    """Write a commented settings file.

    It holds every key with its description and its default, and goes to PATH, or to machd.toml.
    """
    shown = shortened(str(path))
    try:
        with path.open("w" if force else "x", encoding="utf-8") as file:
            file.write(settings_example())
    except FileExistsError:
        raise SettingsError([f"{shown}: is there already; --force overwrites it"]) from None
    except OSError as error:
        reason = error.strerror or str(error)
        raise SettingsError([f"{shown}: cannot be written: {reason}"]) from error
    click.echo(f"Wrote {click.format_filename(path)}")


@config.command()
def schema() -> None:
    """Print the JSON schema of a settings file."""
    _echo_json(settings_schema())


def _check_files(settings: Settings, environ: Mapping[str, str]) -> None:
    """Read the files of keys and tokens; SettingsError if the daemon would refuse one of them."""
    from machd.admin.token import read_hidden_token  # noqa: PLC0415 - brings the framework
    from machd.http.authentication import ApiKeys  # noqa: PLC0415 - the same

    ApiKeys.of(settings, environ)
    if settings.auth.admin_token_file is not None:
        read_hidden_token(Path(settings.auth.admin_token_file))


def _echo_json(data: dict[str, object]) -> None:
    click.echo(json.dumps(data, indent=2))
