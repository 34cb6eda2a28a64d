"""Keeps the checks and times of BLAS libraries in the user's cache directory, for later starts.

They are kept under a digest of everything that they depend on. The libraries themselves are
looked for at each start, so that nothing is loaded because a file of the cache names it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec import Struct

from machd.engine.backend.blas_trial import BlasCheck, BlasTrial, ProductShape

_Finding = TypeVar("_Finding")

_FILE_NAME = "blas.json"
_MAX_KEPT = 16
_MAX_BYTES = 1 << 20
_CPU_FACTS = ("model name", "flags", "CPU implementer", "CPU part", "Features")
"""Lines of ``/proc/cpuinfo`` that say which code a library runs: x86's, then ARM's."""


class _Kept(Struct):
    trials: dict[str, tuple[BlasTrial, ...]] = {}
    checks: dict[str, BlasCheck] = {}


class KeptTrials:
    """Checks and trials by their conditions, in one small file. A disk that cannot be used is not an error."""

    def __init__(self, cache_directory: Path) -> None:
        """Read nothing yet.

        Args:
            cache_directory: The user's; machd's files are in ``machd/`` below it.
        """
        self._path = cache_directory / "machd" / _FILE_NAME

    def find(self, key: str) -> tuple[BlasTrial, ...] | None:
        """Return the trials under these conditions; None if they have to be measured."""
        return self._all().trials.get(key)

    def keep(self, key: str, trials: Sequence[BlasTrial]) -> None:
        """Add trials, and forget the oldest of too many; nothing is kept of a machine that was busy."""
        if not all(trial.is_lasting for trial in trials):
            return
        kept = self._all()
        kept.trials = _added(kept.trials, key, tuple(trials))
        self._write(kept)

    def find_check(self, key: str) -> BlasCheck | None:
        """Return the check under these conditions; None if it has to be made."""
        return self._all().checks.get(key)

    def keep_check(self, key: str, check: BlasCheck) -> None:
        """Add a check, unless the machine had no time for it, and forget the oldest of too many."""
        if check.is_lasting:
            kept = self._all()
            kept.checks = _added(kept.checks, key, check)
            self._write(kept)

    def _all(self) -> _Kept:
        try:
            with self._path.open("rb") as file:
                content = file.read(_MAX_BYTES)
            return msgspec.json.decode(content, type=_Kept)
        except (OSError, ValueError):  # DecodeError is a ValueError
            return _Kept()

    def _write(self, kept: _Kept) -> None:
        """Replace the file by a whole one."""
        with contextlib.suppress(OSError, UnicodeEncodeError):
            self._replace(msgspec.json.encode(kept))

    def _replace(self, content: bytes) -> None:
        folder = self._path.parent
        for missing in reversed([one for one in (folder, *folder.parents) if not one.exists()]):
            missing.mkdir(mode=0o700, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(prefix=".blas", dir=folder)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
            Path(temporary).replace(self._path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise


def _added(kept: Mapping[str, _Finding], key: str, finding: _Finding) -> dict[str, _Finding]:
    """Return the newest findings with one more."""
    others = {one: value for one, value in kept.items() if one != key}
    return dict([*others.items(), (key, finding)][-_MAX_KEPT:])


def conditions_key(
    libraries: Sequence[str],
    shape: ProductShape,
    environ: Mapping[str, str],
    *,
    cpu_facts: Path = Path("/proc/cpuinfo"),
) -> str:
    """Return a digest of what checks and times depend on: files, CPU, shape, variables of the libraries.

    Args:
        libraries: Paths; a file that was replaced has another size or time.
        shape: Of the matrix.
        environ: Of the child processes.
        cpu_facts: The kernel's description of the CPUs.
    """
    variables = {name: value for name, value in environ.items() if _concerns_libraries(name)}
    facts = (
        [(library, *_state(library)) for library in libraries],
        _cpu(cpu_facts),
        (shape.width, shape.columns),
        sorted(variables.items()),
    )
    return hashlib.sha256(repr(facts).encode("utf-8", "surrogatepass")).hexdigest()[:32]


def _concerns_libraries(name: str) -> bool:
    return name.startswith(("OPENBLAS_", "MKL_", "BLIS_", "OMP_", "KMP_", "FLEXIBLAS"))


def _state(library: str) -> tuple[int, int]:
    """Return size, and time of the last change in nanoseconds."""
    try:
        facts = Path(library).stat()
    except OSError:
        return 0, 0
    return facts.st_size, facts.st_mtime_ns


def _cpu(cpu_facts: Path) -> list[str]:
    """Return the lines that describe the first processor."""
    try:
        first = cpu_facts.read_text("utf-8", "replace").split("\n\n", 1)[0]
    except OSError:
        return []
    return [line for line in first.splitlines() if line.startswith(_CPU_FACTS)]
