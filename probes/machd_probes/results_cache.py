"""Results of earlier probes, in the user's cache directory.

A result holds for one :class:`~machd_probes.versions.ProbeBasis` and lies in the folder of it, so
that a changed probe, engine, mlx or mlx-lm never reads an old one. A file that is missing, corrupt
or not ours is measured anew and never an error, and neither is a disk that takes nothing. Verdicts
are not kept: they follow from results by rules, which may change.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import stat
import tempfile
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec import Struct

from machd.capabilities.evidence import Outcome, ProbeResult
from machd.capabilities.matrix import ArchitectureReport
from machd_probes.versions import ProbeBasis

_KEPT_BASES = 8
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def results_directory(cache_directory: Path) -> Path:
    """Return the directory of the results.

    Args:
        cache_directory: From ``machd.user_directories.user_cache_directory``.
    """
    return cache_directory / "machd" / "probes"


class _ArchitectureEntry(Struct, frozen=True, tag="architecture"):
    basis: ProbeBasis
    report: ArchitectureReport


class _ModelEntry(Struct, frozen=True, tag="model"):
    basis: ProbeBasis
    key: str
    results: tuple[ProbeResult, ...]


_Entry = TypeVar("_Entry", _ArchitectureEntry, _ModelEntry)


class ResultsCache:
    """The results of one basis: of tiny architectures by name, of loaded models by key."""

    def __init__(self, directory: Path, basis: ProbeBasis) -> None:
        """Look at nothing yet.

        Args:
            directory: What :func:`results_directory` gives; made with mode 0700 when needed.
            basis: What the results hold for.
        """
        self._directory = directory
        self._basis = basis

    def get(self, name: str) -> ArchitectureReport | None:
        """Return the report of an architecture; None where it has to be measured."""
        entry = self._read("architecture", name, _ArchitectureEntry)
        if entry is None or entry.report.architecture != name:
            return None
        return entry.report

    def put(self, report: ArchitectureReport) -> None:
        """Keep a row.

        One of which anything ended in an error, by a crash, by taking too long or for want of
        memory, is not kept: that says as much of the machine at that moment as of the architecture.
        """
        if _is_lasting(report):
            entry = _ArchitectureEntry(self._basis, report)
            self._write("architecture", report.architecture, entry)

    def get_results(self, key: str) -> tuple[ProbeResult, ...] | None:
        """Return the results of a loaded model; None where it has to be measured."""
        entry = self._read("model", key, _ModelEntry)
        return None if entry is None or entry.key != _digest(key) else entry.results

    def put_results(self, key: str, results: tuple[ProbeResult, ...]) -> None:
        """Keep what was measured on a loaded model; what is worth keeping the caller decides.

        Args:
            key: Names the model and the state of its files; any text.
            results: Of its probes.
        """
        self._write("model", key, _ModelEntry(self._basis, _digest(key), results))

    def _read(self, kind: str, name: str, entry_type: type[_Entry]) -> _Entry | None:
        path = self._path(kind, name)
        if not _is_private(self._directory) or not _is_private(path.parent):
            return None
        try:
            entry = msgspec.json.decode(path.read_bytes(), type=entry_type)
        except (OSError, ValueError, RecursionError):  # DecodeError is a ValueError
            return None
        return entry if entry.basis == self._basis else None

    def _write(self, kind: str, name: str, entry: _ArchitectureEntry | _ModelEntry) -> None:
        path = self._path(kind, name)
        # What a model raised may hold text that JSON cannot.
        with contextlib.suppress(OSError, UnicodeEncodeError):
            self._make_folder(path.parent)
            if _is_private(self._directory) and _is_private(path.parent):
                _replace(path, msgspec.json.encode(entry))

    def _path(self, kind: str, name: str) -> Path:
        # Names and keys come from a command line or a file: only their hash makes a file name.
        return self._directory / self._basis.key / f"{kind}-{_digest(name)}.json"

    def _make_folder(self, folder: Path) -> None:
        if folder.is_dir():
            return
        missing = [one for one in (folder, *folder.parents) if not one.exists()]
        for one in reversed(missing):
            one.mkdir(mode=0o700, exist_ok=True)
        _forget_old(self._directory)


def _is_lasting(report: ArchitectureReport) -> bool:
    # A model that could not be built has no results, only the words of what it raised.
    if MemoryError.__name__ in report.problem:
        return False
    return all(result.outcome is not Outcome.ERRORED for result in report.results)


def _digest(name: str) -> str:
    return hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def _replace(path: Path, content: bytes) -> None:
    """Write a whole file or none."""
    descriptor, temporary = tempfile.mkstemp(prefix=".", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _is_private(folder: Path) -> bool:
    """Return True if no other user could have written results to the directory."""
    try:
        facts = folder.lstat()
    except OSError:
        return False
    ours = stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.geteuid()
    return ours and not facts.st_mode & _OTHERS_WRITE


def _forget_old(directory: Path) -> None:
    """Remove all but the newest bases: each upgrade leaves one behind."""
    if not _is_private(directory):
        return
    folders = [one for one in directory.iterdir() if one.is_dir() and not one.is_symlink()]
    folders.sort(key=lambda one: one.stat().st_mtime, reverse=True)
    for folder in folders[_KEPT_BASES:]:
        shutil.rmtree(folder, ignore_errors=True)
