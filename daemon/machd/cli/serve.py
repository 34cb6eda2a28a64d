"""``machd serve``: the daemon."""

from __future__ import annotations

import asyncio
import os

import click

from machd import __version__
from machd.cli.options import SettingsCommand, model_argument, settings_options
from machd.cli.progress import ProgressBar
from machd.daemon import Daemon
from machd.engine.embedded import user_cache_directory
from machd.engine.opening import engine_loader
from machd.engine.protocol import Engine
from machd.settings.sources import LoadedSettings, process_environ
from machd.telemetry.logs import configure_logs

__all__ = ["serve"]


@click.command(cls=SettingsCommand)
@model_argument
@settings_options
def serve(loaded: LoadedSettings) -> None:
    """Serve MODEL: a directory in mlx-lm layout, a GGUF file, a hub id, or the embedded default."""
    settings = loaded.settings
    configure_logs(level=settings.logging.level, log_format=settings.logging.format)
    environ = process_environ()
    with ProgressBar() as progress:

        def announce(url: str, engine: Engine) -> None:
            progress.stop()
            click.echo(_welcome(url, engine), err=True)

        load = engine_loader(
            settings,
            cache_directory=user_cache_directory(environ),
            set_variable=os.environ.__setitem__,  # noqa: TID251 - mlx reads TMPDIR by itself
            progress=progress,
        )
        daemon = Daemon(settings, load, environ=environ, on_ready=announce)
        asyncio.run(daemon.run())


def _welcome(url: str, engine: Engine) -> str:
    model = engine.model
    where = ", ".join(part for part in (model.backend, model.dtype, model.blas) if part)
    return (
        f"\nmachd {__version__} serves {model.model_id} ({where})\n"
        f"  OpenAI base URL  {url}/v1\n"
        f"  health, metrics  {url}/health  {url}/metrics\n"
        f"Ctrl-C finishes running requests and stops.\n"
    )
