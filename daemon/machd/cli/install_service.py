"""``machd install-service``: the files that make a service manager run this machd."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import click

from machd.cli.launchd_plists import (
    DAEMON_HOME,
    DAEMON_USER,
    LABEL,
    agent_plist,
    daemon_plist,
)
from machd.cli.serve import has_several_models
from machd.cli.service_units import CONFIG_PATH, Installation, UnitFile, system_units, user_units
from machd.engine.loading import embedded
from machd.errors import StartupError
from machd.settings.file import SettingsFile, find_settings_file
from machd.settings.sources import load_settings, process_environ
from machd.user_directories import user_cache_directory

_HIDDEN = (Path("/home"), Path("/root"), Path("/run/user"))
"""What a system service does not see, because of ProtectHome=."""

_SYSTEM_CACHE = Path("/var/cache/private")
"""XDG_CACHE_HOME of the machine's service."""

_AS_DYNAMIC_USER = (
    "systemd-run", "--pipe", "--wait", "-p", "DynamicUser=yes", "-p", "User=machd", "-p", "CacheDirectory=machd",
    "-E", f"XDG_CACHE_HOME={_SYSTEM_CACHE}",
)  # fmt: skip
"""Runs a command as the user that the machine's service has."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """The files to write, and the shell commands to run then."""

    folder: Path
    units: tuple[UnitFile, ...]
    next_commands: tuple[str, ...]


@click.command("install-service")
@click.option("--user", "scope", flag_value="user", help="For this user.")
@click.option("--system", "scope", flag_value="system", help="For the whole machine.")
@click.option(
    "--config",
    "config_path",
    type=click.Path(path_type=Path),
    help=f"Settings file of the service. Without it: {CONFIG_PATH} for the machine, what serve "
    "would read for a user.",
)
@click.option("--dry-run", is_flag=True, help="Print the files instead of writing them.")
@click.option("--force", is_flag=True, help="Overwrite files that say something else.")
@click.option("--platform", type=click.Choice(["linux", "macos"]), hidden=True)
def install_service(
    *,
    scope: str | None,
    config_path: Path | None,
    dry_run: bool,
    force: bool,
    platform: str | None,
) -> None:
    """Make systemd or launchd run this machd as a service.

    Writes the unit files or the property list and says how to start the service.
    """
    if scope is None:
        raise click.UsageError("Say for whom: --user or --system.")
    is_user = scope == "user"
    environ = process_environ()
    is_macos = (platform or ("macos" if sys.platform == "darwin" else "linux")) == "macos"
    installation = _installation(config_path, environ, is_user=is_user)
    if is_macos:
        plan = _launchd_plan(installation, environ, is_user=is_user)
    else:
        plan = _systemd_plan(installation, environ, is_user=is_user)
    if dry_run:
        for unit in plan.units:
            click.echo(f"# {plan.folder / unit.name}\n{unit.text}")
    else:
        _write_all(plan, force=force)
    click.echo("Next:", err=dry_run)
    for command in plan.next_commands:
        click.echo(f"  {command}", err=dry_run)


def running_command(argument: str, interpreter: str) -> tuple[str, ...]:
    """Return the command of the machd that runs now: its script, or its interpreter with ``-m machd``.

    ``argument`` is ``sys.argv[0]``, ``interpreter`` is ``sys.executable``.
    """
    # Not resolved: the link in a virtual environment is what makes it one.
    for script in (Path(argument).absolute(), Path(interpreter).absolute().with_name("machd")):
        if script.name == "machd" and script.is_file() and os.access(script, os.X_OK):
            return (str(script),)
    return (str(Path(interpreter).absolute()), "-m", "machd")


def _installation(
    config_path: Path | None, environ: Mapping[str, str], *, is_user: bool
) -> Installation:
    """Return the program that the service runs.

    Raises:
        SettingsError: Its settings are wrong; better said now than by the service.
        StartupError: The service could not see it.
    """
    command = running_command(sys.argv[0], sys.executable)
    if config_path is None:
        found = find_settings_file(None, environ) if is_user else SettingsFile(CONFIG_PATH)
        path = None if found is None else found.path.absolute()
    else:
        path = config_path.absolute()
    if not is_user:
        for one in (Path(command[0]), path):
            _refuse_hidden(one)
    if path is None or (config_path is None and not path.is_file()):
        return Installation(command, path)
    # Of this process's variables the service has none: only the file counts.
    server = load_settings(config_path=path, environ={}, flags={}).settings.server
    return Installation(command, path, server.host, server.port)


def _refuse_hidden(path: Path | None) -> None:
    if path is not None and any(place in path.parents for place in _HIDDEN):
        raise StartupError(
            f"{path} is in a user's own directory, which a service of the machine does not see; put "
            "it elsewhere, such as /opt, or use --user"
        )


def _systemd_plan(
    installation: Installation, environ: Mapping[str, str], *, is_user: bool
) -> _Plan:
    config_home = environ.get("XDG_CONFIG_HOME") or str(_home(environ) / ".config")
    folder = Path(config_home, "systemd", "user") if is_user else Path("/etc/systemd/system")
    units = user_units(installation) if is_user else system_units(installation)
    cache = user_cache_directory(environ) if is_user else _SYSTEM_CACHE
    pull = (*installation.command, "model", "pull")
    as_service = () if is_user else ("sudo", *_AS_DYNAMIC_USER)
    control = "systemctl --user" if is_user else "sudo systemctl"
    names = " ".join(unit.name for unit in units)
    start = (f"{control} daemon-reload", f"{control} enable --now {names}")
    before = () if is_user else _config_commands(installation)
    after = ("loginctl enable-linger  # to run without being logged in",) if is_user else ()
    fetch = _fetch_commands(installation, (*as_service, *pull), cache)
    return _Plan(folder, units, (*before, *fetch, *start, *after))


def _launchd_plan(
    installation: Installation, environ: Mapping[str, str], *, is_user: bool
) -> _Plan:
    pull = (*installation.command, "model", "pull")
    if is_user:
        home = _home(environ)
        folder, unit = home / "Library" / "LaunchAgents", agent_plist(installation, home=home)
        quoted = shlex.quote(str(folder / unit.name))
        fetch = _fetch_commands(installation, pull, user_cache_directory(environ, "darwin"))
        return _Plan(folder, (unit,), (*fetch, f"launchctl bootstrap gui/$(id -u) {quoted}"))
    folder, unit = Path("/Library/LaunchDaemons"), daemon_plist(installation)
    cache = user_cache_directory({"HOME": str(DAEMON_HOME)}, "darwin")
    as_service = ("sudo", "-u", DAEMON_USER, "env", f"HOME={DAEMON_HOME}")
    commands = (
        *_config_commands(installation),
        *_fetch_commands(installation, (*as_service, *pull), cache),
        f"sudo launchctl bootstrap system {folder / unit.name}",
        f"sudo launchctl print system/{LABEL}",
    )
    return _Plan(folder, (unit,), commands)


def _config_commands(installation: Installation) -> tuple[str, ...]:
    path = installation.config_path
    if path is None or path.is_file():
        return ()
    return (
        shlex.join(("sudo", "mkdir", "-p", str(path.parent))),
        shlex.join(("sudo", *installation.command, "config", "init", str(path))),
    )


def _fetch_commands(
    installation: Installation, pull: tuple[str, ...], cache: Path
) -> tuple[str, ...]:
    """Return the command that fetches the default model for the service, where it is to serve that and lacks it.

    The service itself fetches nothing: nobody watches it, and the machine's has no network.
    """
    path = installation.config_path
    if path is not None and path.is_file():
        settings = load_settings(config_path=path, environ={}, flags={}).settings
        if settings.model.path is not None or has_several_models(settings):
            return ()
    try:
        is_there = embedded.locate(cache) is not None
    except OSError:
        is_there = False
    return () if is_there else (shlex.join(pull),)


def _home(environ: Mapping[str, str]) -> Path:
    home = environ.get("HOME")
    if not home:
        raise StartupError("HOME is not set, so this user has no place for a service")
    return Path(home)


def _write_all(plan: _Plan, *, force: bool) -> None:
    """Write what differs; nothing at all where something of another's stands in the way.

    Raises:
        StartupError: A file says something else and ``force`` is not given, or cannot be written.
    """
    try:
        texts = {unit: _read(plan.folder / unit.name) for unit in plan.units}
        for unit, text in texts.items():
            if text not in {None, unit.text} and not force:
                raise StartupError(
                    f"{plan.folder / unit.name} is there and says something else; --force "
                    "overwrites it, --dry-run shows what would be written"
                )
        plan.folder.mkdir(parents=True, exist_ok=True)
        for unit in plan.units:
            path = plan.folder / unit.name
            path.write_text(unit.text, "utf-8")
            path.chmod(0o644)
            click.echo(f"Wrote {path}")
    except OSError as error:
        raise StartupError(
            f"{error.filename or plan.folder} cannot be written: {error.strerror}; run it as root "
            "(sudo), or use --user"
        ) from error


def _read(path: Path) -> str | None:
    """Return the file's text; None where there is no file."""
    try:
        return path.read_text("utf-8", errors="replace")
    except FileNotFoundError:
        return None
