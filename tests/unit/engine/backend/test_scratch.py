"""Compiled code is loaded only from a directory that no other user can write to."""

from __future__ import annotations

import stat
import tempfile
from pathlib import Path

import pytest

from machd.engine.backend.scratch import private_scratch_directory, use_scratch_directory
from machd.errors import StartupError


def test_it_is_ours_alone(tmp_path: Path) -> None:
    """The directory and every parent made for it have mode 0700."""
    base = tmp_path / "cache" / "machd"
    directory = private_scratch_directory(base)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (directory, base, base.parent)] == [
        0o700,
        0o700,
        0o700,
    ]


def test_it_is_kept_between_starts(tmp_path: Path) -> None:
    """Compiled code is found again on the next start, and a wider mode is narrowed."""
    directory = private_scratch_directory(tmp_path)
    (directory / "kernel.so").write_bytes(b"code")
    directory.chmod(0o755)
    again = private_scratch_directory(tmp_path)
    assert (again / "kernel.so").read_bytes() == b"code"
    assert stat.S_IMODE(again.stat().st_mode) == 0o700


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
def test_a_directory_open_to_others_is_refused(tmp_path: Path, mode: int) -> None:
    """A directory that other users can write to is refused: it may hold foreign code."""
    base = tmp_path / "base"
    base.mkdir()
    base.chmod(mode)
    with pytest.raises(StartupError, match="written to by others"):
        private_scratch_directory(base)


def test_a_planted_directory_open_to_others_is_refused(tmp_path: Path) -> None:
    """The same for the directory itself, made by someone before the first start."""
    (tmp_path / "scratch").mkdir()
    (tmp_path / "scratch").chmod(0o777)
    with pytest.raises(StartupError, match="written to by others"):
        private_scratch_directory(tmp_path)


@pytest.mark.parametrize("level", ["base", "scratch"])
def test_a_symbolic_link_is_refused(tmp_path: Path, level: str) -> None:
    """A link could point into a directory of another's."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    base = tmp_path / "base"
    if level == "base":
        base.symlink_to(elsewhere)
    else:
        base.mkdir(mode=0o700)
        (base / "scratch").symlink_to(elsewhere)
    with pytest.raises(StartupError, match="symbolic link"):
        private_scratch_directory(base)


def test_another_owner_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory of another user's stays theirs to fill."""
    uid = tmp_path.stat().st_uid
    monkeypatch.setattr("os.geteuid", lambda: uid + 1)
    with pytest.raises(StartupError, match="owned by user id"):
        private_scratch_directory(tmp_path)


def test_a_file_in_the_way_is_an_error_with_a_fix(tmp_path: Path) -> None:
    """Nothing is removed on the user's behalf."""
    (tmp_path / "scratch").write_text("mine")
    with pytest.raises(StartupError, match="not a directory; remove it"):
        private_scratch_directory(tmp_path)


def test_using_it_reaches_both_readers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries read TMPDIR; Python has read it already and must be told."""
    monkeypatch.setattr(tempfile, "tempdir", "/elsewhere")
    variables: dict[str, str] = {}
    use_scratch_directory(tmp_path, variables)
    assert variables == {"TMPDIR": str(tmp_path)}
    assert tempfile.gettempdir() == str(tmp_path)
