"""Generated checkpoints of vision-language families, each drawn once a process: that takes a second."""

from __future__ import annotations

import os
import tempfile
from functools import lru_cache
from pathlib import Path

from machd.user_directories import user_cache_directory
from machd_probes.vision_families.checkpoint import write_family


def write_kept_family(name: str, directory: Path) -> Path:
    """Write a family's tiny checkpoint, as ``write_family`` does; returns the directory, which is made."""
    directory.mkdir(parents=True)
    for file, content in _files(name).items():
        (directory / file).write_bytes(content)
    return directory


@lru_cache(maxsize=2)
def _files(name: str) -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as folder:
        directory = write_family(name, Path(folder) / name, user_cache_directory(os.environ))
        return {one.name: one.read_bytes() for one in directory.iterdir()}
