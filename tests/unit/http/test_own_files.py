"""Files that go with the daemon that has left them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from machd.own_files import OwnFile


@pytest.fixture(name="path")
def _path(tmp_path: Path) -> Path:
    path = tmp_path / "own"
    path.write_text("ours")
    return path


def test_what_is_ours_is_removed(path: Path) -> None:
    """Also when it is gone already."""
    own = OwnFile(path)
    own.remove()
    assert not path.exists()
    own.remove()


def test_what_a_successor_has_put_there_stays(path: Path) -> None:
    """Whether it got another number from the file system or, as here, the same one."""
    own = OwnFile(path)
    path.write_text("theirs")
    os.utime(path, (1, 1))
    own.remove()
    assert path.read_text() == "theirs"
