"""Versions that verdicts and fingerprints hold for."""

from __future__ import annotations

from msgspec import Struct

from machd import __version__
from machd.installed import installed_version


class Versions(Struct, frozen=True, kw_only=True):
    """Versions that verdicts hold for; null where nothing is loaded that could tell."""

    machd: str
    mlx: str | None = None
    mlx_lm: str | None = None
    backend: str | None = None
    dtype: str | None = None


def installed_versions() -> Versions:
    """Return the installed versions of machd and of the packages that it was measured with."""
    return Versions(
        machd=__version__, mlx=installed_version("mlx"), mlx_lm=installed_version("mlx-lm")
    )
