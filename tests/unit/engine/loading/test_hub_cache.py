"""Files of a hub cache beside a download."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from machd.engine.loading.hub_cache import cached_repository, without_passwords
from machd.engine.loading.hub_transfer import fetch_file


def test_a_file_that_is_renamed_meanwhile_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A download renames its part of a file between the look at the directory and that at the file."""
    blobs = tmp_path / "models--org--name" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / "whole").write_bytes(bytes(5))
    (blobs / "part.incomplete").write_bytes(bytes(7))
    lstat = Path.lstat

    def renamed(path: Path) -> os.stat_result:
        if path.suffix == ".incomplete":
            path.unlink()
        return lstat(path)

    monkeypatch.setattr(Path, "lstat", renamed)
    repository = cached_repository(blobs.parent)
    assert (repository.size_bytes, repository.is_being_fetched) == (5, False)


def test_a_whole_file_is_on_the_disk_before_it_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its name says that its hash was right, and nothing hashes it again."""
    path, content = tmp_path / "whole.incomplete", b"weights"
    path.write_bytes(content)
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda number: synced.append(os.fstat(number).st_ino))
    found = fetch_file("weights", "http://127.0.0.1:1", path, len(content), lambda *_: None)
    assert found == hashlib.sha256(content).hexdigest()
    assert synced == [path.stat().st_ino]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("at https://user:a%40b@hub.example/x", "at https://hub.example/x"),
        ("at https://token@hub.example:80", "at https://hub.example:80"),
        ("at https://hub.example/a@b", "at https://hub.example/a@b"),
        ("mail a@b", "mail a@b"),
    ],
)
def test_addresses_are_told_without_passwords(text: str, shown: str) -> None:
    """What stands before the host of an address is left out, and nothing else."""
    assert without_passwords(text) == shown
