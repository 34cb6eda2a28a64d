"""Programs that the tests run beside machd; ``scripts/setup --dev`` installs them on Debian."""

from __future__ import annotations

import os
import shutil

import pytest

_MORE_FOLDERS = "/usr/sbin"
"""Debian installs nginx here, and not every user has this folder in PATH."""


def path_of(name: str) -> str:
    """The path of a program.

    Raises:
        AssertionError: It is not installed.
    """
    path = _find(name)
    assert path is not None, f"{name} is not installed: scripts/setup --dev installs it"
    return path


def needs_programs(*names: str) -> pytest.MarkDecorator:
    """Skip a test on a machine without these programs; on CI it fails, for a skip proves nothing."""
    missing = [name for name in names if _find(name) is None]
    return pytest.mark.skipif(
        bool(missing) and "CI" not in os.environ,
        reason=f"{', '.join(missing)} not installed: scripts/setup --dev installs it",
    )


def _find(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', os.defpath)}:{_MORE_FOLDERS}")
