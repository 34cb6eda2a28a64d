"""A daemon of several scripted models, each with an engine process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from structlog.testing import capture_logs

from support.clients.cached_answers import Asked
from support.daemon.supervised_daemon import SupervisedDaemon
from support.engines.dialogue import chat

LONG_TEXT = "an answer that goes on and on, whatever else is asked for " * 4

Make = Callable[..., SupervisedDaemon]
"""Makes a daemon of models by the queries of their paths; further arguments are settings of ``[models]``."""


def asked(model: str, text: str = LONG_TEXT) -> Asked:
    """Return a chat in which a scripted model says a text."""
    return Asked(chat(f"say {text}") | {"model": model})


@contextmanager
def making(folder: Path) -> Iterator[Make]:
    """Give what makes daemons with their configuration in a folder, and keep their logs to themselves."""

    def make(models: dict[str, str], **section: object) -> SupervisedDaemon:
        return several_models(folder, models, section=section)

    with capture_logs():
        yield make


def several_models(
    folder: Path,
    models: Mapping[str, str],
    *,
    flags: Mapping[str, object] | None = None,
    section: Mapping[str, object] | None = None,
    environ: Mapping[str, str] | None = None,
) -> SupervisedDaemon:
    """Return a daemon of these models, by the queries of their paths, as :mod:`support.daemon.engine_child` reads them.

    ``section`` are settings of ``[models]``; memory is for two models of 35 MB unless they say so.
    """
    shared = {"memory_gb": 0.1, "max_turn_s": 2.0} | dict(section or {})
    lines = ["[models]", *(f"{key} = {_toml(value)}" for key, value in shared.items())]
    for name, query in models.items():
        lines += [f'[models."{name}"]', f'path = "fake?{query}"']
    config = folder / "machd.toml"
    config.write_text("\n".join(lines))
    shared_flags: dict[str, object] = {
        "continuous_batching.enabled": True,
        "continuous_batching.max_b": 8,
        "cache.prefix": False,
    }
    flags = shared_flags | dict(flags or {})
    return SupervisedDaemon(flags, config_path=config, environ=environ)


def _toml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
