"""Files that a person names: regular ones only, never awaited, never more than the bound."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from machd.regular_files import IrregularFileError, open_regular, read_regular


def test_reader_returns_content_and_mode(tmp_path: Path) -> None:
    """A regular file is read whole, also through a link, with its permissions."""
    file = tmp_path / "file"
    file.write_bytes(b"content")
    file.chmod(0o640)
    link = tmp_path / "link"
    link.symlink_to(file)

    found = read_regular(link, max_bytes=7)

    assert (found.content, found.mode) == (b"content", 0o640)


@pytest.mark.parametrize("kind", ["pipe", "folder", "device", "link to a pipe"])
def test_reader_refuses_what_is_not_a_regular_file(kind: str, tmp_path: Path) -> None:
    """A pipe without a writer, a folder and an endless device are refused at once."""
    path = tmp_path / "named"
    if kind == "device":
        path = Path("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        os.mkfifo(tmp_path / "pipe")
        path.symlink_to(tmp_path / "pipe")

    with pytest.raises(IrregularFileError, match="it is not a regular file"):
        read_regular(path, max_bytes=1)


def test_reader_refuses_a_pipe_that_replaces_the_file_after_the_first_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was opened is what counts, and opening it did not wait for a writer."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    regular = os.stat_result((stat.S_IFREG | 0o600, *[0] * 9))
    monkeypatch.setattr(Path, "stat", lambda _path, **_options: regular)

    with pytest.raises(IrregularFileError):
        open_regular(pipe)


def test_reader_refuses_more_than_the_bound(tmp_path: Path) -> None:
    """One byte more than the bound is too much, and the message has the bound."""
    file = tmp_path / "file"
    file.write_bytes(b"x" * 9)

    with pytest.raises(IrregularFileError, match="larger than 8 bytes"):
        read_regular(file, max_bytes=8)


@pytest.mark.parametrize("name", ["a\0b", "a\ud800b"])
def test_reader_refuses_a_path_that_no_file_can_have(name: str) -> None:
    """A null character or half a character in a path is an OSError like any other."""
    with pytest.raises(IrregularFileError, match="no file can have this path"):
        open_regular(Path(name))


def test_reader_refuses_a_link_where_links_are_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both when it is there at the first look and when it comes between that and the opening."""
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "file")
    (tmp_path / "file").touch()

    with pytest.raises(IrregularFileError, match="it is not a regular file"):
        open_regular(link, follows_links=False)

    regular = os.stat_result((stat.S_IFREG | 0o600, *[0] * 9))
    monkeypatch.setattr(Path, "stat", lambda _path, **_options: regular)
    with pytest.raises(OSError, match="link"):
        open_regular(link, follows_links=False)
