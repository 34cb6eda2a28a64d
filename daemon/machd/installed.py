"""Which versions are installed, asked of the packages' own records."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as distribution_version


def installed_version(distribution: str) -> str | None:
    """The version of a distribution, which is not imported; None where it is not installed."""
    try:
        return distribution_version(distribution)
    except PackageNotFoundError:
        return None
