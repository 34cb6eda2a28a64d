"""The directories of a user's own files."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path


def user_cache_directory(environ: Mapping[str, str], platform: str = sys.platform) -> Path:
    """Find the directory of the user's regenerable files; machd's are in ``machd/`` below it."""
    configured = environ.get("XDG_CACHE_HOME", "")
    if configured and Path(configured).is_absolute():
        return Path(configured)
    home = Path(environ["HOME"]) if environ.get("HOME") else Path.home()
    return home / "Library" / "Caches" if platform == "darwin" else home / ".cache"
