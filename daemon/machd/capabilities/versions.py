"""Versions that verdicts and fingerprints hold for."""

from __future__ import annotations

from msgspec import Struct


class Versions(Struct, frozen=True, kw_only=True):
    """Versions that verdicts hold for; null where nothing is loaded that could tell."""

    machd: str
    mlx: str | None = None
    mlx_lm: str | None = None
    backend: str | None = None
    dtype: str | None = None
