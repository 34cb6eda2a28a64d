"""The catalogue of the vision matrix: families, and checks in the order in which they run. Imports neither mlx nor mlx-vlm."""

from __future__ import annotations

import tomllib
from pathlib import Path

SERVED = "served"
"""The first result of every family: whether it is served with its vision tower."""

IMAGE_CHECKS = ("image_alone", "two_images")
"""Checks that decide on images."""

BATCHING_CHECKS = ("images_in_batch", "text_beside_images")
"""Checks that decide on rows with images in a batch."""

WINDOW_CHECK = "window_overflow"
"""Check that batching needs as well where layers keep a window: rows of text that are longer than it."""

PREFIX_CHECK = "image_prefix"
VIDEO_CHECK = "video"

CHECK_NAMES = (*IMAGE_CHECKS, *BATCHING_CHECKS, WINDOW_CHECK, PREFIX_CHECK, VIDEO_CHECK)
"""Every check: a function of ``machd_probes.vision_matrix.checks``."""

_DIRECTORY = Path(__file__).resolve().parent.parent / "vision_families" / "families"
_UNSUPPORTED = "unsupported"


def family_names() -> list[str]:
    """Every family of mlx-vlm that was looked at, sorted; those that cannot be generated too."""
    stems = {path.stem for path in _DIRECTORY.glob("*.toml") if "+" not in path.stem}
    reasons = tomllib.loads((_DIRECTORY / f"{_UNSUPPORTED}.toml").read_text(encoding="utf-8"))
    return sorted((stems - {_UNSUPPORTED}) | set(reasons))
