"""The first start of ``machd serve`` without a model: fetches the embedded default, before anything is served.

A service manager's start fetches nothing, since nobody watches it: there the missing model is an error. So it is
where ``model.offline`` is set to true.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType

from machd.cli.launchd_plists import LABEL
from machd.engine.loading import embedded
from machd.settings.sources import LoadedSettings, OriginKind
from machd.user_directories import user_cache_directory


def fetch_default_model(loaded: LoadedSettings, environ: Mapping[str, str]) -> None:
    """Fetch the embedded default where it is to be served, is not on this machine, and may be fetched.

    Args:
        loaded: The settings of a daemon with one model.
        environ: The process's variables, those of a service manager among them.

    Raises:
        ModelDownloadError: It cannot be fetched, or the cache cannot be written.
    """
    is_default = loaded.settings.model.path in {None, embedded.EMBEDDED_MODEL_ID}
    if not is_default or not _may_fetch(loaded, environ):
        return
    cache_directory = user_cache_directory(environ)
    if embedded.locate(cache_directory) is not None:
        return
    from machd.cli.progress import ProgressBar  # noqa: PLC0415 - slow to import, and rarely needed

    with _stops_cleanly(), ProgressBar() as bar:
        embedded.pull(cache_directory, progress=bar)


def _may_fetch(loaded: LoadedSettings, environ: Mapping[str, str]) -> bool:
    """Return true where no setting decides about downloads and no service manager has started this daemon."""
    is_unset = loaded.origins["model.offline"].kind is OriginKind.DEFAULT
    is_service = "NOTIFY_SOCKET" in environ or environ.get("XPC_SERVICE_NAME") == LABEL
    return is_unset and not is_service


@contextmanager
def _stops_cleanly() -> Iterator[None]:
    """Let SIGINT and SIGTERM end the process inside only after the fetching program and its files are gone."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    handlers = [signal.signal(number, _exit) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, handlers, strict=True):
            signal.signal(number, handler)


def _exit(_number: int, _frame: FrameType | None) -> None:
    sys.exit(0)
