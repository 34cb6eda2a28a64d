"""Installed BLAS libraries are found as files, without loading them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from machd.engine.backend.blas_candidates import installed_libraries


@pytest.fixture(autouse=True)
def _nothing_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Run as in an environment without libraries of its own."""
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "prefix"))
    monkeypatch.setattr(sys, "base_prefix", str(tmp_path / "prefix"))


def _library(folder: Path, name: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_bytes(b"")
    return path


def _loader_cache(tmp_path: Path, *paths: Path) -> Path:
    """Write a list as ``ldconfig`` does: sonames and paths that end with a NUL."""
    file = tmp_path / "ld.so.cache"
    strings = (part for path in paths for part in (path.name, str(path)))
    file.write_bytes(b"glibc-ld.so.cache1.1\x03\x00" + "\0".join(strings).encode() + b"\0")
    return file


def test_libraries_are_found_in_the_order_of_preference(tmp_path: Path) -> None:
    """The loader's list and LD_LIBRARY_PATH are searched, and a library that is listed and gone is left out."""
    blis = _library(tmp_path / "lib", "libblis.so.4")
    openblas = _library(tmp_path / "mine", "libopenblas.so.0")
    gone = tmp_path / "lib" / "libflexiblas.so.3"
    cache = _loader_cache(tmp_path, gone, blis, tmp_path / "lib" / "libblas.so.3")
    environ = {"LD_LIBRARY_PATH": f":{tmp_path / 'mine'}"}
    assert installed_libraries(environ, loader_cache=cache) == (str(openblas), str(blis))


def test_one_file_with_several_names_is_one_library(tmp_path: Path) -> None:
    """It would be checked twice."""
    openblas = _library(tmp_path / "lib", "libopenblas.so.0")
    other = tmp_path / "lib" / "libopenblasp.so.0"
    other.symlink_to(openblas)
    cache = _loader_cache(tmp_path, other, openblas)
    assert installed_libraries({}, loader_cache=cache) == (str(openblas),)


def test_without_a_list_of_the_loader_the_environments_own_libraries_are_found(
    tmp_path: Path,
) -> None:
    """A library of the environment itself is found, such as conda installs."""
    mine = _library(tmp_path / "prefix" / "lib", "libopenblas.so.0")
    assert installed_libraries({}, loader_cache=tmp_path / "none") == (str(mine),)
