"""Fixtures of the tests of the service's files."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(name="machd")
def _machd(tmp_path: Path) -> Path:
    """An executable of that name."""
    path = tmp_path / "bin" / "machd"
    path.parent.mkdir()
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path
