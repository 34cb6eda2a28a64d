"""``machd serve``: the daemon."""

from __future__ import annotations

import os
import shlex
import sys
import textwrap
from typing import TYPE_CHECKING

import click

from machd import __version__
from machd.cli.first_start import fetch_default_model
from machd.cli.options import SettingsCommand, model_argument, settings_options, settings_sources
from machd.engine.ranks.joining import rank_place
from machd.installed import command_name
from machd.process.notify import forget_service_variables
from machd.served.started_engine import StartedEngine, cannot_start
from machd.settings.model import Settings
from machd.settings.sources import LoadedSettings

if TYPE_CHECKING:
    from machd.engine.protocol.engine import ModelFront
    from machd.link.decode_mode import DecodeModeDecision


ENGINE_COMMAND = (sys.executable, "-P", "-m", "machd.cli.engine")
"""Starts an engine process; the number of its end of the link follows."""


@click.command(
    cls=SettingsCommand, short_help="Serve a model: a directory, a GGUF file, or the default."
)
@model_argument
@settings_options
def serve(loaded: LoadedSettings) -> None:
    """Serve MODEL: a directory in mlx-lm layout, a GGUF file, a hub id, or the embedded default."""
    sources = settings_sources()
    forget_service_variables(os.environ)  # noqa: TID251 - whatever is started from here on inherits it
    place = rank_place(sources.environ)
    if place is not None and not place.leads:
        from machd.cli.rank import follow  # noqa: PLC0415 - another kind of process

        follow(loaded.settings, sources, place)
        return
    first: StartedEngine | None = None
    if not has_several_models(loaded.settings):
        if place is None:
            fetch_default_model(loaded, sources.environ)
        # The process imports for a second, while this one does the same.
        try:
            first = StartedEngine(ENGINE_COMMAND, loaded.settings.model_dump_json())
        except OSError as error:
            raise cannot_start(error) from error
    from machd.cli.front import run_front  # noqa: PLC0415 - see above

    run_front(loaded, sources, first, is_alone=place is None)


def has_several_models(settings: Settings) -> bool:
    """Return true where there may be other models than the one of ``model.path``."""
    section = settings.models
    return bool(section.tables or section.directory or section.hub_cache)


def welcome(
    url: str,
    admin_url: str | None,
    front: ModelFront | None,
    decision: DecodeModeDecision | None,
    *,
    names_admin: bool = False,
    has_page: bool = True,
) -> str:
    """Return the lines that are printed once requests are taken.

    Args:
        url: Of the public listener.
        admin_url: Of the operators' listener; None without one.
        front: Of the model that is served; None where there are several.
        decision: How it decodes.
        names_admin: Whether ``machd ctl`` has to be told the operators' address, because it stands in no place where
            it looks.
        has_page: Whether browsers get a page at the public listener.
    """
    served = "several models; /v1/models lists them"
    if front is not None:
        model = front.model
        where = ", ".join(part for part in (model.backend, model.dtype, model.blas) if part)
        served = f"{model.model_id} ({where})"
    return (
        f"\nmachd {__version__} serves {served}\n"
        f"{_address_lines(url, has_page=has_page)}"
        f"{_operator_line(admin_url, names_admin=names_admin)}"
        f"{mode_lines(decision)}"
        f"Ctrl-C finishes running requests and stops.\n"
    )


def _address_lines(url: str, *, has_page: bool) -> str:
    """List the addresses for clients: URLs, or the option of curl for a socket, which has no URL."""
    if not url.startswith("unix:"):
        page = f"  in a browser     {url}/\n" if has_page else ""
        return (
            f"  OpenAI base URL  {url}/v1\n{page}  health, metrics  {url}/health  {url}/metrics\n"
        )
    path = url.removeprefix("unix:")
    option = "--abstract-unix-socket" if path.startswith("@") else "--unix-socket"
    curl = f"curl {option} {shlex.quote(path.removeprefix('@'))} http://localhost"
    return f"  socket           {path}\n  OpenAI API       {curl}/v1/models\n  health           {curl}/health\n"


def _operator_line(admin_url: str | None, *, names_admin: bool) -> str:
    if admin_url is None:
        return ""
    address = f" --address {shlex.quote(admin_url.removeprefix('http://'))}" if names_admin else ""
    command = "status" if admin_url.startswith("unix:") else "page"
    return f"  operators        {admin_url} ({command_name()} ctl{address} {command})\n"


def mode_lines(decision: DecodeModeDecision | None) -> str:
    """The decode mode, and why where it is not the one that was asked for."""
    if decision is None:
        return ""
    line = f"  decode mode      {decision.active.value}\n"
    if decision.is_as_requested:
        return line
    why = f"not {decision.requested.value}: {decision.reason}"
    indent = " " * 19
    return line + textwrap.fill(why, 80, initial_indent=indent, subsequent_indent=indent) + "\n"
