"""``machd serve``: the daemon."""

from __future__ import annotations

import asyncio
import functools
import gc
import os
import shlex
import signal
import textwrap
from collections.abc import Callable
from pathlib import Path

import click

from machd import __version__
from machd.cli.options import SettingsCommand, model_argument, settings_options, settings_sources
from machd.cli.progress import ProgressBar
from machd.clock import SystemClock
from machd.daemon import Daemon
from machd.engine.backend.blas import BlasChoice
from machd.engine.open import choose_checked_blas, engine_loader, follower
from machd.engine.protocol.engine import ModelFront
from machd.engine.protocol.progress import SilentProgress
from machd.engine.ranks.joining import RankPlace, rank_place
from machd.engine_process.assembly import engine_loop
from machd.follower import Follower
from machd.installed import command_name
from machd.link.decode_mode import DecodeModeDecision
from machd.process.notify import forget_service_variables
from machd.settings.model import Settings
from machd.settings.sources import LoadedSettings, OriginKind
from machd.telemetry.logs import configure_logs
from machd.user_directories import user_cache_directory
from machd_probes.startup import startup_measures


@click.command(
    cls=SettingsCommand, short_help="Serve a model: a directory, a GGUF file, or the default."
)
@model_argument
@settings_options
def serve(loaded: LoadedSettings) -> None:
    """Serve MODEL: a directory in mlx-lm layout, a GGUF file, a hub id, or the embedded default."""
    settings, sources = loaded.settings, settings_sources()
    forget_service_variables(os.environ)  # noqa: TID251 - whatever is started from here on inherits it
    configure_logs(level=settings.logging.level, log_format=settings.logging.format)
    place = rank_place(sources.environ)
    cache_directory = user_cache_directory(sources.environ)
    blas = choose_checked_blas(
        settings.engine.blas,
        cache_directory=cache_directory,
        environ=os.environ,  # noqa: TID251 - libraries read theirs by themselves
    )
    if place is not None and not place.leads:
        _follow(settings, cache_directory, blas, place)
        return
    with ProgressBar(has_lines=False) as progress:

        def announce(url: str, front: ModelFront) -> None:
            progress.stop()
            # What is there now stays. Looked through again and again it would stop all streams for
            # a tenth of a second each time.
            gc.collect()
            gc.freeze()
            is_given = loaded.origins["admin.listen"].kind is OriginKind.FLAG
            told = welcome(url, daemon.admin_url, front, daemon.decode_mode, names_admin=is_given)
            click.echo(told, err=True)

        load = engine_loader(
            settings,
            cache_directory=cache_directory,
            environ=os.environ,  # noqa: TID251 - libraries read theirs by themselves
            progress=progress,
            blas=blas,
            place=place,
        )
        measures = startup_measures(
            cache_directory,
            model_path=settings.model.path,
            blas=blas.for_other_processes,
            on_measure=lambda: progress.stage("probing", None),
        )
        make_daemon = functools.partial(
            Daemon,
            sources,
            loaded,
            functools.partial(engine_loop, load=load, clock=SystemClock(), measures=measures),
            on_ready=announce,
        )
        daemon = _made_between_signals(make_daemon)
        asyncio.run(daemon.run())


def _follow(settings: Settings, cache_directory: Path, blas: BlasChoice, place: RankPlace) -> None:
    """Be a rank that rank 0 orders; rank 0 shows its progress."""
    run = follower(
        settings,
        cache_directory=cache_directory,
        environ=os.environ,  # noqa: TID251 - libraries read theirs by themselves
        progress=SilentProgress(),
        blas=blas,
        place=place,
    )
    stall_timeout_s = settings.engine.stall_timeout_s
    Follower(run, stall_timeout_s=stall_timeout_s, clock=SystemClock()).run()


def _made_between_signals(make_daemon: Callable[[], Daemon]) -> Daemon:
    """Make the daemon, which binds addresses and writes files, and stop it in order from then on.

    On its event loop it handles signals itself.
    """
    received: list[int] = []
    _handle_stops(received.append)
    daemon = make_daemon()
    _handle_stops(lambda _number: daemon.request_stop())
    for _ in received:
        daemon.request_stop()
    return daemon


def _handle_stops(handle: Callable[[int], None]) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _frame: handle(received))


def welcome(
    url: str,
    admin_url: str | None,
    front: ModelFront,
    decision: DecodeModeDecision | None,
    *,
    names_admin: bool = False,
) -> str:
    """Return the lines that are printed once requests are taken.

    Args:
        url: Of the public listener.
        admin_url: Of the operators' listener; None without one.
        front: Of the model that is served.
        decision: How it decodes.
        names_admin: Whether ``machd ctl`` has to be told the operators' address, because it stands in no place where
            it looks.
    """
    model = front.model
    where = ", ".join(part for part in (model.backend, model.dtype, model.blas) if part)
    return (
        f"\nmachd {__version__} serves {model.model_id} ({where})\n"
        f"{_address_lines(url)}"
        f"{_operator_line(admin_url, names_admin=names_admin)}"
        f"{mode_lines(decision)}"
        f"Ctrl-C finishes running requests and stops.\n"
    )


def _address_lines(url: str) -> str:
    """Where clients find the daemon: URLs, or how curl reaches a socket, which has no URL."""
    if not url.startswith("unix:"):
        return f"  OpenAI base URL  {url}/v1\n  health, metrics  {url}/health  {url}/metrics\n"
    path = url.removeprefix("unix:")
    option = "--abstract-unix-socket" if path.startswith("@") else "--unix-socket"
    curl = f"curl {option} {shlex.quote(path.removeprefix('@'))} http://localhost"
    return f"  socket           {path}\n  OpenAI API       {curl}/v1/models\n  health           {curl}/health\n"


def _operator_line(admin_url: str | None, *, names_admin: bool) -> str:
    if admin_url is None:
        return ""
    address = f" --address {shlex.quote(admin_url.removeprefix('http://'))}" if names_admin else ""
    return f"  operators        {admin_url} ({command_name()} ctl{address} status)\n"


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
