"""The files of the experts, read by offset and watched for change."""

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
from machd.engine.experts.conversion import Bytes, convert
from machd.engine.experts.stored_layer import ParameterForm, Place
from machd.errors import ModelNotFoundError

_F_NOCACHE = 48
"""fcntl(2) of macOS: reads of this file leave no copy in the system's cache."""


class ExpertReadError(OSError):
    """An expert cannot be read as it was when the model was loaded."""


_BLOCK_BYTES = 4096
"""What direct reads are aligned to, in the file and in memory; no device's blocks are larger."""


@dataclass(frozen=True, slots=True)
class _Open:
    """A file that is open.

    Attributes:
        is_direct: Reads pass the system's cache by (``O_DIRECT``). The bank is a cache itself, so a second
            copy would take memory for nothing; and they cost a quarter of the processor's time.
        identity: Size and time of change when it was opened.
    """

    descriptor: int
    is_direct: bool
    identity: tuple[int, int]


class _Staging(threading.local):
    """A thread's own memory for what it reads, before it is converted."""

    def __init__(self) -> None:
        self.memory = mmap.mmap(-1, _BLOCK_BYTES)

    def room(self, size_bytes: int) -> memoryview:
        """Return so many bytes at least, aligned."""
        if len(self.memory) < size_bytes:
            self.memory = mmap.mmap(-1, size_bytes)
        return memoryview(self.memory)


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
        self._staging = _Staging()
        for path in sorted(set(paths)):
            try:
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
        file = self._files[place.file]
        try:
            stored = self._fetch(file, place, form.stored_bytes)
        except OSError as error:
            raise ExpertReadError(f"{place.file.name}: {error.strerror or error}") from error
        checksum = zlib.crc32(stored.data)
        if self._checksums.setdefault(place, checksum) != checksum:
            raise ExpertReadError(f"{place.file.name} has other content than before")
        if form.stored_dtype == form.dtype:
            into[:] = stored
        else:
            convert(stored, form.stored_dtype, into, form.dtype)
        return form.stored_bytes

    def _fetch(self, file: _Open, place: Place, size_bytes: int) -> Bytes:
        """Read bytes into the thread's own memory; they hold until its next read.

        Raises:
            OSError: The file cannot be read, is shorter than it was, or was changed.
        """
        begin = place.offset // _BLOCK_BYTES * _BLOCK_BYTES
        end = place.offset + size_bytes
        room_bytes = -(-(end - begin) // _BLOCK_BYTES) * _BLOCK_BYTES
        room, done_bytes = self._staging.room(room_bytes), 0
        while done_bytes < end - begin:
            count = os.preadv(file.descriptor, [room[done_bytes:room_bytes]], begin + done_bytes)
            if count == 0:
                raise ExpertReadError("it is shorter than it was")
            done_bytes += count
        if _identity(file.descriptor) != file.identity:
            raise ExpertReadError("it was changed while it was served")
        if not file.is_direct and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.descriptor, begin, room_bytes, os.POSIX_FADV_DONTNEED)
        return np.frombuffer(room, dtype=np.uint8, count=size_bytes, offset=place.offset - begin)


def _open(path: Path) -> _Open:
    with open_regular(path) as file:
        plain = file.fileno()
        descriptor, is_direct = os.dup(plain), False
        if hasattr(os, "O_DIRECT"):
            with suppress(OSError):  # a file system without it
                direct = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
                if os.path.samestat(os.fstat(direct), os.fstat(plain)):
                    os.close(descriptor)
                    descriptor, is_direct = direct, True
                else:
                    os.close(direct)
    if sys.platform == "darwin":
        import fcntl  # noqa: PLC0415 - not on Windows

        with suppress(OSError):  # a file system without it
            fcntl.fcntl(descriptor, _F_NOCACHE, 1)
    return _Open(descriptor, is_direct, _identity(descriptor))


def _identity(descriptor: int) -> tuple[int, int]:
    """Size and time of change."""
    facts = os.fstat(descriptor)
    return facts.st_size, facts.st_mtime_ns
