"""The checkpoint's files, from which single experts are read by offset."""

from __future__ import annotations

import mmap
import os
import sys
import threading
import zlib
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from machd.engine.backend.model_files import open_regular
from machd.engine.experts.dtype_conversion import Bytes, convert
from machd.engine.experts.stored_layer import ExpertParameter, Location
from machd.errors import ModelNotFoundError

_F_NOCACHE = 48
"""fcntl(2) of macOS: reads of this file leave no copy in the page cache."""

_BLOCK_BYTES = 4096
"""Alignment of direct reads, in the file and in memory; no common device has larger logical blocks."""


class ExpertReadError(OSError):
    """An expert cannot be read as it was when the model was loaded."""


@dataclass(frozen=True, slots=True)
class _OpenFile:
    """An open file.

    Attributes:
        is_direct: Reads bypass the page cache (``O_DIRECT``). The bank is a cache itself, so the page cache
            would hold each expert a second time.
        identity: Size and modification time when the file was opened.
    """

    descriptor: int
    is_direct: bool
    identity: tuple[int, int]


class _Staging(threading.local):
    """A reading thread's own page-aligned buffer, for bytes before they are converted."""

    def __init__(self) -> None:
        self.memory = mmap.mmap(-1, _BLOCK_BYTES)

    def buffer(self, size_bytes: int) -> memoryview:
        if len(self.memory) < size_bytes:
            self.memory = mmap.mmap(-1, size_bytes)
        return memoryview(self.memory)


class ExpertFiles:
    """Weight files, kept open. :meth:`read` may be called on any thread.

    A file that is deleted or replaced is still read as it was. A file that is modified is refused from then
    on, because its size or modification time differs, or the checksum of an expert that was read before.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        """Open the files.

        Raises:
            ModelNotFoundError: A file cannot be opened.
            ModelFormatError: A path is no regular file.
        """
        self._files: dict[Path, _OpenFile] = {}
        self._checksums: dict[Location, int] = {}
        self._staging = _Staging()
        for path in sorted(set(paths)):
            try:
                self._files[path] = _open(path)
            except OSError as error:
                self.close()
                raise ModelNotFoundError(f"cannot read {path.name}: {error.strerror}") from error

    def close(self) -> None:
        """Close the files. No thread may be reading any more."""
        for file in self._files.values():
            os.close(file.descriptor)
        self._files.clear()

    def read(self, location: Location, parameter: ExpertParameter, into: Bytes) -> int:
        """Read one parameter of one expert, convert it to its dtype in memory, and return the bytes read.

        ``into`` is uint8 [parameter.nbytes], undefined after an error.

        Raises:
            ExpertReadError: The file cannot be read, is shorter than it was, or was modified.
        """
        file = self._files[location.file]
        try:
            stored = self._stored_bytes(file, location.offset, parameter.stored_bytes)
        except OSError as error:
            raise ExpertReadError(f"{location.file.name}: {error.strerror or error}") from error
        checksum = zlib.crc32(stored.data)
        if self._checksums.setdefault(location, checksum) != checksum:
            raise ExpertReadError(f"{location.file.name} has other content than before")
        if parameter.stored_dtype == parameter.dtype:
            into[:] = stored
        else:
            convert(stored, parameter.stored_dtype, into, parameter.dtype)
        return parameter.stored_bytes

    def _stored_bytes(self, file: _OpenFile, offset: int, size_bytes: int) -> Bytes:
        """Read into the thread's staging buffer, valid until its next read; a file that is shorter or modified is an OSError."""
        begin = offset // _BLOCK_BYTES * _BLOCK_BYTES
        end = offset + size_bytes
        aligned_bytes = -(-(end - begin) // _BLOCK_BYTES) * _BLOCK_BYTES
        buffer, done_bytes = self._staging.buffer(aligned_bytes), 0
        while done_bytes < end - begin:
            rest = buffer[done_bytes:aligned_bytes]
            count = os.preadv(file.descriptor, [rest], begin + done_bytes)
            if count == 0:
                raise ExpertReadError("it is shorter than it was")
            done_bytes += count
        if _identity(file.descriptor) != file.identity:
            raise ExpertReadError("it was modified while it was served")
        if not file.is_direct and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.descriptor, begin, aligned_bytes, os.POSIX_FADV_DONTNEED)
        return np.frombuffer(buffer, dtype=np.uint8, count=size_bytes, offset=offset - begin)


def _open(path: Path) -> _OpenFile:
    with open_regular(path) as file:
        plain = file.fileno()
        descriptor, is_direct = os.dup(plain), False
        if hasattr(os, "O_DIRECT"):
            with suppress(OSError):  # a file system without direct reads
                direct = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
                if os.path.samestat(os.fstat(direct), os.fstat(plain)):
                    os.close(descriptor)
                    descriptor, is_direct = direct, True
                else:
                    os.close(direct)
    if sys.platform == "darwin":
        import fcntl  # noqa: PLC0415 - not on Windows

        with suppress(OSError):  # a file system without uncached reads
            fcntl.fcntl(descriptor, _F_NOCACHE, 1)
    return _OpenFile(descriptor, is_direct, _identity(descriptor))


def _identity(descriptor: int) -> tuple[int, int]:
    """Return size in bytes and modification time in nanoseconds."""
    facts = os.fstat(descriptor)
    return facts.st_size, facts.st_mtime_ns
