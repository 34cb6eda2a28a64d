"""Keeps the checks of BLAS libraries in the user's cache directory, for later starts.

They are kept under a digest of everything that they depend on. The libraries themselves are
looked for at each start, so that nothing is loaded because a file of the cache names it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

import msgspec

from machd.engine.backend.blas_check import BlasCheck

_FILE_NAME = "blas.json"
_MAX_KEPT = 16
_MAX_BYTES = 1 << 20
_CPU_FACTS = ("model name", "flags", "CPU implementer", "CPU part", "Features")
"""Lines of ``/proc/cpuinfo`` that say which code a library runs: x86's, then ARM's."""


class KeptChecks:
    """Checks by their conditions, in one small file. A disk that cannot be used is not an error."""

    def __init__(self, cache_directory: Path) -> None:
        self._path = cache_directory / "machd" / _FILE_NAME

    def find(self, key: str) -> BlasCheck | None:
        """Return the check under these conditions; None if it has to be made."""
        return self._all().get(key)

    def keep(self, key: str, check: BlasCheck) -> None:
        """Add a check, unless the machine had no time for it, and forget the oldest of too many."""
        if not check.is_lasting:
            return
        others = {one: value for one, value in self._all().items() if one != key}
        self._write(dict([*others.items(), (key, check)][-_MAX_KEPT:]))

    def _all(self) -> dict[str, BlasCheck]:
        try:
            with self._path.open("rb") as file:
                content = file.read(_MAX_BYTES)
            return msgspec.json.decode(content, type=dict[str, BlasCheck])
        except (OSError, ValueError):  # DecodeError is a ValueError
            return {}

    def _write(self, kept: Mapping[str, BlasCheck]) -> None:
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


def conditions_key(
    library: str, environ: Mapping[str, str], *, cpu_facts: Path = Path("/proc/cpuinfo")
) -> str:
    """Return a digest of what a check depends on: CPU, variables of the libraries, and the file, by its size and time."""
    variables = {name: value for name, value in environ.items() if _concerns_libraries(name)}
    facts = (
        (library, *_state(library)),
        _cpu(cpu_facts),
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
    try:
        first = cpu_facts.read_text("utf-8", "replace").split("\n\n", 1)[0]
    except OSError:
        return []
    return [line for line in first.splitlines() if line.startswith(_CPU_FACTS)]
