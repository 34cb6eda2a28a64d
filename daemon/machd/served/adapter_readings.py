"""Readings of adapters' files: their facts and the hash of their content, until the files change.

All of it touches files, so it runs on worker threads; no two threads at a time for one path.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Never, Protocol, TypeAlias

from machd.errors import AdapterError, MachdError

_MAX_FILES = 256
"""Of an adapter's directory that are looked at: a training run keeps one for each of its checkpoints."""

Stamp: TypeAlias = tuple[tuple[str, int, int, int, int], ...]
"""Of each file: name, times of change of content and of status in nanoseconds, bytes, inode."""


class AdapterFacts(Protocol):
    """Facts in the headers of an adapter's files."""

    @property
    def format(self) -> str:
        """The program that wrote them, such as ``peft``."""
        ...

    @property
    def max_rank(self) -> int:
        """The largest of its layers' ranks."""
        ...

    @property
    def layers(self) -> int:
        """Number of layers that it changes."""
        ...

    @property
    def dtype(self) -> str:
        """Its weights'; several with commas."""
        ...

    @property
    def base_model(self) -> str | None:
        """Name of the model that it was trained on; None if the files do not say."""
        ...

    @property
    def size_bytes(self) -> int:
        """Of the files that count."""
        ...


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """Readers of adapters' files, which are a part of the engine.

    Attributes:
        describe: Reads headers; raises AdapterError for files that are no adapter, or none that is served.
        digest: Hashes the content that an adapter's weights depend on; raises AdapterError or OSError.
    """

    describe: Callable[[Path], AdapterFacts]
    digest: Callable[[Path], bytes]


def _no_files(_path: Path) -> Never:
    raise AdapterError("this program reads no adapters")


NO_ADAPTER_FILES = AdapterFiles(_no_files, _no_files)
"""Of a program without the part of the engine that reads them."""


@dataclass(frozen=True, slots=True)
class DescribedFiles:
    """An adapter's files that can be used.

    Attributes:
        modified_unix_s: When the last of them was written.
    """

    facts: AdapterFacts
    modified_unix_s: float


@dataclass(slots=True)
class _Reading:
    stamp: Stamp
    described: DescribedFiles | None = None
    error: AdapterError | None = None
    digest: bytes | None = None


class AdapterReadings:
    """Facts and digests by path. A file that changes is read again when it is asked for."""

    def __init__(
        self, files: AdapterFiles, on_refusal: Callable[[str, AdapterError], None]
    ) -> None:
        """Know nothing yet; ``on_refusal`` is told once of files that cannot be used, by the adapter's name."""
        self._files = files
        self._on_refusal = on_refusal
        self._readings: dict[Path, _Reading] = {}

    def described(self, name: str, path: Path) -> DescribedFiles:
        """Return what the headers say now.

        Raises:
            AdapterError: The adapter cannot be used; the message says why.
        """
        return self._read(name, path)[1]

    def digest(self, name: str, path: Path) -> bytes:
        """Return the hash of the content as it is now.

        Raises:
            AdapterError: As of :meth:`described`.
        """
        reading, _ = self._read(name, path)
        if reading.digest is None:
            try:
                reading.digest = self._files.digest(path)
            except (MachdError, OSError) as error:
                self._refuse(name, reading, error)
                raise _error_of(name, error) from error
        return reading.digest

    def keep(self, paths: frozenset[Path]) -> None:
        """Forget all others."""
        self._readings = {path: one for path, one in self._readings.items() if path in paths}

    def _read(self, name: str, path: Path) -> tuple[_Reading, DescribedFiles]:
        stamp = _stamp(path)
        reading = self._readings.get(path)
        if reading is None or reading.stamp != stamp:
            reading = self._readings[path] = _Reading(stamp)
            try:
                if not stamp:
                    raise AdapterError("there are no files")
                modified_unix_s = max(one[1] for one in stamp) / 1e9
                reading.described = DescribedFiles(self._files.describe(path), modified_unix_s)
            except (MachdError, OSError) as error:
                self._refuse(name, reading, error)
        if reading.error is not None:
            # One for each request: an exception collects the frames that it passes.
            raise AdapterError(reading.error.message)
        assert reading.described is not None, "what was not refused has been described"
        return reading, reading.described

    def _refuse(self, name: str, reading: _Reading, error: MachdError | OSError) -> None:
        reading.error = _error_of(name, error)
        self._on_refusal(name, reading.error)


def _error_of(name: str, error: MachdError | OSError) -> AdapterError:
    # Not str(): that of an OSError has the path.
    reason = error.message if isinstance(error, MachdError) else error.strerror or "unreadable"
    return AdapterError(f"the adapter {name!r} cannot be used: {reason}")


def _stamp(path: Path) -> Stamp:
    """Look at a file, or at the files in a directory; empty where there are none."""
    try:
        status = path.stat()
        if not stat.S_ISDIR(status.st_mode):
            return (_stamp_of(path.name, status),)
        with os.scandir(path) as entries:
            looked_at = [(one.name, one.stat()) for one in islice(entries, _MAX_FILES)]
    except OSError:
        return ()
    return tuple(sorted(_stamp_of(*one) for one in looked_at if stat.S_ISREG(one[1].st_mode)))


def _stamp_of(name: str, status: os.stat_result) -> tuple[str, int, int, int, int]:
    return (name, status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino)
