"""Size and time of a model's files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from machd.served.model_files import ModelFiles, files_at


def test_files_are_measured_where_a_model_lies(tmp_path: Path) -> None:
    """Those of a directory together, and a file alone; none where there is nothing."""
    for name, size, written_s in (("config.json", 10, 1_000), ("model.safetensors", 500, 2_000)):
        file = tmp_path / name
        file.write_bytes(bytes(size))
        os.utime(file, (written_s, written_s))
    (tmp_path / "inner").mkdir()
    assert files_at(tmp_path) == ModelFiles(510, 2_000.0)
    assert files_at(tmp_path / "config.json") == ModelFiles(10, 1_000.0)
    assert files_at(tmp_path / "inner") is None
    assert files_at(tmp_path / "missing") is None
    assert files_at(Path("fake?size=1")) is None


def test_a_file_below_the_home_directory_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As ``model.path`` takes it, with ``~``; a user without a home has no files."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "small.gguf").write_bytes(bytes(7))
    measured = files_at(Path("~/small.gguf"))
    assert measured is not None
    assert measured.size_bytes == 7
    assert files_at(Path("~no-such-user/small.gguf")) is None
