"""The files of blocks in one directory: each is there as a whole or not at all.

A file gets its name by a rename, when all of it is on the disk: a process that is killed leaves a
temporary file at worst, which the next start removes. Everything is named by the directory's file
descriptor and no link is followed, so nobody can slip another place in later.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass

_BLOCK = re.compile(r"((?:[0-9a-f]{2}){1,64})\.safetensors")
_TEMPORARY = re.compile(r"\.[0-9a-f]{2,128}\.[0-9a-f]{16}\.tmp")
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_FEW_DESCRIPTORS = frozenset({errno.EMFILE, errno.ENFILE})
_NO_FILE = frozenset({errno.ELOOP, errno.ENXIO, errno.ENODEV, errno.EISDIR})
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class NotAFileError(OSError):
    """What has a block's name is a link, or no regular file."""


@dataclass(frozen=True, slots=True)
class BlockFile:
    """What is named like a block's file."""

    digest: bytes
    size_bytes: int
    used_unix_s: float


class KeyDirectory:
    """A directory of blocks that were made under one key."""

    def __init__(self, fd: int, reopen: Callable[[], int] | None = None) -> None:
        """Take over a directory's file descriptor.

        Args:
            fd: The directory.
            reopen: Makes the directory again and opens it, after somebody has removed it.
        """
        self._fd = fd
        self._reopen = reopen
        self._spare_fd: int | None = None
        self._keep_spare()

    def files(self) -> list[BlockFile]:
        """All that is named like a block's file; temporary files of killed processes are removed."""
        found: list[BlockFile] = []
        with os.scandir(self._fd) as entries:
            for entry in entries:
                if _TEMPORARY.fullmatch(entry.name):
                    self._unlink(entry.name)
                elif name := _BLOCK.fullmatch(entry.name):
                    with suppress(OSError):  # removed meanwhile, or its disk is broken there
                        facts = entry.stat(follow_symlinks=False)
                        found.append(
                            BlockFile(bytes.fromhex(name[1]), facts.st_size, facts.st_mtime)
                        )
        return found

    def read(self, digest: bytes, max_bytes: int) -> bytes:
        """The first bytes of a block's file.

        Raises:
            NotAFileError: It is a link or no regular file.
            OSError: It is not there, or cannot be read now.
        """
        fd = self._open(_name(digest))
        try:
            facts = os.fstat(fd)
            if not stat.S_ISREG(facts.st_mode):
                raise NotAFileError("it is no regular file")
            pieces: list[bytes] = []
            wanted = min(max_bytes, facts.st_size)
            while wanted > 0 and (piece := os.read(fd, wanted)):  # once, but for gigabytes
                pieces.append(piece)
                wanted -= len(piece)
        finally:
            os.close(fd)
            self._keep_spare()
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def write(self, digest: bytes, pieces: Iterable[memoryview], used_unix_s: float) -> int:
        """Write a block's file, in the place of one that is there; returns its length.

        Args:
            digest: Names it.
            pieces: What is in it.
            used_unix_s: When the block was last of use; 0 for now.

        Raises:
            OSError: Nothing is left of it.
        """
        temporary = f".{digest.hex()}.{secrets.token_hex(8)}.tmp"
        fd = os.open(temporary, _CREATE, 0o600, dir_fd=self._fd)
        try:
            try:
                size_bytes = sum(_write_all(fd, piece) for piece in pieces)
                if used_unix_s > 0:
                    os.utime(fd, (used_unix_s, used_unix_s))
                os.fsync(fd)
            finally:
                os.close(fd)
            os.replace(temporary, _name(digest), src_dir_fd=self._fd, dst_dir_fd=self._fd)
        except BaseException:
            self._unlink(temporary)
            raise
        return size_bytes

    def touch(self, digest: bytes) -> None:
        """Note that a block was of use now; that it cannot be noted is no fault."""
        # Not every macOS can do it for what a link is, which there is none of here.
        with suppress(OSError, NotImplementedError):
            os.utime(_name(digest), dir_fd=self._fd, follow_symlinks=False)

    def delete(self, digest: bytes) -> None:
        """Delete a block's file, or what has its name; that it cannot be deleted is no fault."""
        self._unlink(_name(digest))

    def restore(self) -> None:
        """Make the directory again; nothing is in it.

        Raises:
            SettingsError: It cannot be made, or another daemon has made it.
        """
        if self._reopen is not None:
            fd = self._reopen()
            os.dup2(fd, self._fd, inheritable=False)  # the same number for all threads
            os.close(fd)

    def close(self) -> None:
        """Give the file descriptors back."""
        os.close(self._fd)
        if self._spare_fd is not None:
            os.close(self._spare_fd)

    def _open(self, name: str) -> int:
        """Open for reading, with the spare file descriptor where connections have all others."""
        try:
            return os.open(name, _READ, dir_fd=self._fd)
        except OSError as error:
            if error.errno in _NO_FILE:
                raise NotAFileError(error.errno, error.strerror) from error
            if error.errno not in _FEW_DESCRIPTORS or self._spare_fd is None:
                raise
        os.close(self._spare_fd)
        self._spare_fd = None
        return os.open(name, _READ, dir_fd=self._fd)

    def _keep_spare(self) -> None:
        if self._spare_fd is None:
            with suppress(OSError):
                self._spare_fd = os.dup(self._fd)

    def _unlink(self, name: str) -> None:
        with suppress(OSError):
            os.unlink(name, dir_fd=self._fd)


def _name(digest: bytes) -> str:
    return f"{digest.hex()}.safetensors"


def _write_all(fd: int, piece: memoryview) -> int:
    """Write to the end, which a full disk may keep a single call from."""
    written = 0
    while written < len(piece):
        written += os.write(fd, piece[written:])
    return written
