"""A rank of ``machd serve`` that rank 0 orders; rank 0 shows its progress."""

from __future__ import annotations

import os
from collections.abc import Callable

from machd.clock import SystemClock
from machd.engine.loading.source import resolve_model
from machd.engine.open import choose_checked_blas, follower
from machd.engine.protocol.progress import SilentProgress
from machd.engine.ranks.joining import RankPlace
from machd.follower import Follower
from machd.settings.model import Settings
from machd.settings.sources import SettingsSources
from machd.telemetry.logs import configure_logs, log_model
from machd.user_directories import user_cache_directory


def follow(settings: Settings, sources: SettingsSources, place: RankPlace) -> None:
    """Follow rank 0 to its end.

    Raises:
        MachdError: The shard could not be loaded, or rank 0 or another rank is lost.
    """
    configure_logs(level=settings.logging.level, log_format=settings.logging.format)
    cache_directory = user_cache_directory(sources.environ)
    environ = os.environ  # noqa: TID251 - libraries read theirs by themselves
    blas = choose_checked_blas(
        settings.engine.blas, cache_directory=cache_directory, environ=environ
    )
    run = follower(
        settings,
        cache_directory=cache_directory,
        environ=environ,
        progress=SilentProgress(),
        blas=blas,
        place=place,
    )

    def run_located(on_order: Callable[[], None]) -> None:
        source = resolve_model(
            settings.model.path, offline=settings.model.offline, cache_directory=cache_directory
        )
        log_model(source.model_id)
        run(source, on_order)

    stall_timeout_s = settings.engine.stall_timeout_s
    Follower(run_located, stall_timeout_s=stall_timeout_s, clock=SystemClock()).run()
