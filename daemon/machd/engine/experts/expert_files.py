"""The files of the experts, read by offset and watched for change."""

from __future__ import annotations

import os
import sys
import zlib
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from machd.engine.backend.model_files import open_regular
from machd.engine.experts.conversion import Bytes, convert
from machd.engine.experts.stored_layer import ParameterForm, Place
from machd.errors import ModelNotFoundError

_F_NOCACHE = 48
"""fcntl(2) of macOS: reads of this file leave no copy in the system's cache."""


class ExpertReadError(OSError):
    """An expert cannot be read as it was when the model was loaded."""


@dataclass(frozen=True, slots=True)
class _Open:
    descriptor: int
    identity: tuple[int, int]


class ExpertFiles:
    """Weight files, kept open. Its :meth:`read` may be called on any thread.

    A file that is deleted or renamed can still be read. One that is written to is refused from then on:
    its size or time of change differs, or else the checksum of an expert that was read before.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        """Open the files.

        Raises:
            ModelNotFoundError: One cannot be opened.
            ModelFormatError: One is no regular file.
        """
        self._files: dict[Path, _Open] = {}
        self._checksums: dict[Place, int] = {}
        try:
            for path in sorted(set(paths)):
                self._files[path] = _open(path)
        except OSError as error:
            self.close()
            raise ModelNotFoundError(f"cannot read {path.name}: {error.strerror}") from error

    def close(self) -> None:
        """Close the files; nothing may be reading any more."""
        for file in self._files.values():
            os.close(file.descriptor)
        self._files.clear()

    def read(self, place: Place, form: ParameterForm, into: Bytes) -> int:
        """Read one parameter of one expert, and convert it.

        Args:
            place: Where it lies.
            form: Its dtypes and size.
            into: uint8 [form.nbytes], overwritten; undefined after an error.

        Returns:
            Bytes read.

        Raises:
            ExpertReadError: The file cannot be read, is shorter than it was, or was changed.
        """
        is_same = form.stored_dtype == form.dtype
        stored = into if is_same else np.empty(form.stored_bytes, dtype=np.uint8)
        file = self._files[place.file]
        try:
            self._fill(file, place, stored)
        except OSError as error:
            raise ExpertReadError(f"{place.file.name}: {error.strerror}") from error
        checksum = zlib.crc32(stored)
        if self._checksums.setdefault(place, checksum) != checksum:
            raise ExpertReadError(f"{place.file.name} has other content than before")
        if not is_same:
            convert(stored, form.stored_dtype, into, form.dtype)
        return form.stored_bytes

    def _fill(self, file: _Open, place: Place, stored: Bytes) -> None:
        view, done_bytes = memoryview(stored), 0
        while done_bytes < len(view):
            count = os.preadv(file.descriptor, [view[done_bytes:]], place.offset + done_bytes)
            if count == 0:
                raise ExpertReadError(f"{place.file.name} is shorter than it was")
            done_bytes += count
        if _identity(file.descriptor) != file.identity:
            raise ExpertReadError(f"{place.file.name} was changed while it was served")
        if hasattr(os, "posix_fadvise"):
            # The bank has it now; a second copy in the system's cache would take memory for nothing.
            os.posix_fadvise(file.descriptor, place.offset, len(view), os.POSIX_FADV_DONTNEED)


def _open(path: Path) -> _Open:
    with open_regular(path) as file:
        descriptor = os.dup(file.fileno())
    if sys.platform == "darwin":
        import fcntl  # noqa: PLC0415 - not on Windows

        with suppress(OSError):  # a file system without it
            fcntl.fcntl(descriptor, _F_NOCACHE, 1)
    return _Open(descriptor, _identity(descriptor))


def _identity(descriptor: int) -> tuple[int, int]:
    """Size and time of change."""
    facts = os.fstat(descriptor)
    return facts.st_size, facts.st_mtime_ns
