"""A vision model of random weights, for as long as ``machd bench --vision`` measures it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from machd.cli.progress import CountingBar
from machd.errors import StartupError
from machd.installed import how_to_install
from machd.settings.model import Settings
from machd.settings.sources import process_environ
from machd.user_directories import user_cache_directory


@contextmanager
def generated_vision_model(progress: CountingBar) -> Iterator[str]:
    """Yield the path of a vision model that is removed afterwards; StartupError without the extra vision."""
    from machd_probes.vision_families.checkpoint import (  # noqa: PLC0415 - imports mlx
        write_family,
    )

    progress.say("writing a vision model")
    with tempfile.TemporaryDirectory(prefix="machd-vision-") as folder:
        directory = Path(folder) / "qwen2_vl"
        cache_directory = user_cache_directory(process_environ())
        try:
            write_family("qwen2_vl", directory, cache_directory, scale="mid")
        except ImportError:
            raise StartupError(
                f"a vision model is written with mlx-vlm, which is missing: {how_to_install('vision')}"
            ) from None
        yield os.fspath(directory)


def with_model(settings: Settings, path: str | None) -> Settings:
    """Return the settings with another model; None leaves theirs."""
    if path is None:
        return settings
    model = settings.model.model_copy(update={"path": path})
    return settings.model_copy(update={"model": model})
