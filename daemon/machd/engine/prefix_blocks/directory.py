"""The directories of blocks: one for each key, in one that is private to one daemon at a time.

Blocks hold prompts, so a directory that another user owns or may enter is refused. Everything is
named by a directory's file descriptor, and no link is followed, so that no other place can be
slipped in later. Two daemons cannot share a directory: each would count its own files alone, and
delete what the other relies on. The kernel releases the lock when the process ends, however it ends.
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
from pathlib import Path

from machd.errors import SettingsError

_SETTING = "cache.disk_dir"
_LOCK = "lock"
_KEY = re.compile(r"(?:[0-9a-f]{2}){1,64}")
_BLOCK = re.compile(r"((?:[0-9a-f]{2}){1,64})\.safetensors")
_TEMPORARY = re.compile(r"\.[0-9a-f]{2,128}\.[0-9a-f]{16}\.tmp")

_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_SAFE = os.O_NOFOLLOW | os.O_CLOEXEC
_FEW_DESCRIPTORS = frozenset({errno.EMFILE, errno.ENFILE})
_NO_FILE = frozenset({errno.ELOOP, errno.ENXIO, errno.ENODEV, errno.EISDIR})
_NO_DIRECTORY = frozenset({errno.ELOOP, errno.ENOTDIR, errno.EEXIST})


class NotAFileError(OSError):
    """A link, or anything but a regular file, that has a block's name."""


@dataclass(frozen=True, slots=True)
class BlockFile:
    """An entry of a directory that is named like a block's file."""

    digest: bytes
    size_bytes: int
    used_unix_s: float


class KeyDirectory:
    """The files of the blocks that were made under one key, each there as a whole or not at all.

    A file gets its name by a rename, once all of it is on the disk. A process that is killed leaves
    a temporary file at worst, which the next start removes.
    """

    def __init__(self, fd: int, reopen: Callable[[], int] | None = None) -> None:
        """Take over a directory's file descriptor."""
        self._fd = fd
        self._reopen = reopen
        self._spare_fd: int | None = None
        self._keep_spare()

    def files(self) -> list[BlockFile]:
        """List the files of blocks, and remove temporary files of killed processes."""
        found: list[BlockFile] = []
        with os.scandir(self._fd) as entries:
            for entry in entries:
                if _TEMPORARY.fullmatch(entry.name):
                    self._unlink(entry.name)
                elif name := _BLOCK.fullmatch(entry.name):
                    with suppress(OSError):  # removed meanwhile, or its disk is broken there
                        facts = entry.stat(follow_symlinks=False)
                        digest = bytes.fromhex(name[1])
                        found.append(BlockFile(digest, facts.st_size, facts.st_mtime))
        return found

    def read(self, digest: bytes, max_bytes: int) -> bytes:
        """Read the first bytes of a block's file.

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
        """Write a block's file, in the place of one that is there, as used now for the time 0; returns its length.

        Raises:
            OSError: It cannot be written, and nothing is left of it.
        """
        temporary = f".{digest.hex()}.{secrets.token_hex(8)}.tmp"
        fd = os.open(
            temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _SAFE, 0o600, dir_fd=self._fd
        )
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
        """Note that a block was of use now; a failure is ignored."""
        # Not every macOS can do it for what a link is, which there is none of here.
        with suppress(OSError, NotImplementedError):
            os.utime(_name(digest), dir_fd=self._fd, follow_symlinks=False)

    def delete(self, digest: bytes) -> None:
        """Delete a block's file, or the link of its name; a failure is ignored."""
        self._unlink(_name(digest))

    def restore(self) -> None:
        """Make the directory again after it was removed; it is empty then.

        Raises:
            SettingsError: It cannot be made, or another daemon has made it.
        """
        if self._reopen is not None:
            _move_descriptor(self._reopen(), self._fd)

    def close(self) -> None:
        """Close the file descriptors."""
        os.close(self._fd)
        if self._spare_fd is not None:
            os.close(self._spare_fd)

    def _open(self, name: str) -> int:
        """Open for reading, with the spare file descriptor where connections have all others."""
        flags = os.O_RDONLY | os.O_NONBLOCK | _SAFE
        try:
            return os.open(name, flags, dir_fd=self._fd)
        except OSError as error:
            if error.errno in _NO_FILE:
                raise NotAFileError(error.errno, error.strerror) from error
            if error.errno not in _FEW_DESCRIPTORS or self._spare_fd is None:
                raise
        os.close(self._spare_fd)
        self._spare_fd = None
        return os.open(name, flags, dir_fd=self._fd)

    def _keep_spare(self) -> None:
        if self._spare_fd is None:
            with suppress(OSError):
                self._spare_fd = os.dup(self._fd)

    def _unlink(self, name: str) -> None:
        with suppress(OSError):
            os.unlink(name, dir_fd=self._fd)


class BlockDirectory:
    """The locked directory that has a sub-directory for each key."""

    def __init__(self, path: Path) -> None:
        """Make what is missing of the path, mode 0700, and lock it.

        Raises:
            SettingsError: It is a link or no directory, belongs to another user, is open to others,
                cannot be written, or another daemon uses it.
        """
        self._path = path
        self._fd, self._lock_fd = _open_locked(path)

    def of_key(self, key: bytes) -> KeyDirectory:
        """Open the sub-directory of a key, and make it if it is not there.

        Raises:
            SettingsError: There is something else of that name, or it cannot be made.
        """
        return KeyDirectory(self._open_key(key), lambda: self._reopen_key(key))

    def found(self, key: bytes) -> KeyDirectory:
        """Open the sub-directory of a key that is there.

        Raises:
            OSError, SettingsError: It is not there, is something else, or cannot be used.
        """
        return KeyDirectory(_open_private(self._path / key.hex(), self._fd))

    def other_keys(self, key: bytes) -> list[bytes]:
        """List the other keys that have a sub-directory, or anything else of its name."""
        with os.scandir(self._fd) as entries:
            names = [one.name for one in entries if _KEY.fullmatch(one.name)]
        return [bytes.fromhex(name) for name in names if name != key.hex()]

    def remove(self, key: bytes) -> None:
        """Remove the sub-directory of a key if it is empty; a failure is ignored."""
        with suppress(OSError):
            os.rmdir(key.hex(), dir_fd=self._fd)

    def close(self) -> None:
        """Release the lock."""
        os.close(self._lock_fd)
        os.close(self._fd)

    def _open_key(self, key: bytes) -> int:
        path = self._path / key.hex()
        try:
            with suppress(FileExistsError):
                os.mkdir(path.name, 0o700, dir_fd=self._fd)
            return _open_private(path, self._fd)
        except OSError as error:
            raise _unusable(path, error) from error

    def _reopen_key(self, key: bytes) -> int:
        """Make again what was removed while in use: the directory, its lock, a key's sub-directory."""
        if not self._is_in_place():
            fd, lock_fd = _open_locked(self._path)
            _move_descriptor(lock_fd, self._lock_fd)
            _move_descriptor(fd, self._fd)
        return self._open_key(key)

    def _is_in_place(self) -> bool:
        """Find out whether the paths still lead to the open directory and the open lock."""
        try:
            lock = os.stat(_LOCK, dir_fd=self._fd, follow_symlinks=False)
            return os.path.samestat(self._path.lstat(), os.fstat(self._fd)) and os.path.samestat(
                lock, os.fstat(self._lock_fd)
            )
        except OSError:
            return False


def check_block_directory(path: Path) -> None:
    """Make the directory if it is not there, and check that a :class:`BlockDirectory` can use it.

    Raises:
        SettingsError: It cannot be used.
    """
    BlockDirectory(path).close()


def _open_locked(path: Path) -> tuple[int, int]:
    try:
        for missing in [one for one in (path, *path.parents) if not os.path.lexists(one)][::-1]:
            missing.mkdir(mode=0o700, exist_ok=True)
        fd = _open_private(path)
    except ValueError:
        raise SettingsError([f"{_SETTING}: no path is like that; name another"]) from None
    except OSError as error:
        raise _unusable(path, error) from error
    try:
        return fd, _lock(path, fd)
    except BaseException:
        os.close(fd)
        raise


def _open_private(path: Path, parent_fd: int | None = None) -> int:
    """Open a directory that no other user owns or may enter.

    Raises:
        OSError: It cannot be opened, is a link, or no directory.
        SettingsError: Another user owns it or may enter it.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | _SAFE
    fd = os.open(path if parent_fd is None else path.name, flags, dir_fd=parent_fd)
    facts = os.fstat(fd)
    if facts.st_uid != os.geteuid():
        problem = f"it is owned by user id {facts.st_uid}; name a directory of the daemon's user"
    elif facts.st_mode & _OTHERS:
        mode = stat.S_IMODE(facts.st_mode)
        problem = f"others may enter it (mode {mode:04o}); it holds prompts: run chmod 700 on it"
    else:
        return fd
    os.close(fd)
    raise SettingsError([f"{_SETTING}: {path} cannot be used: {problem}"])


def _lock(path: Path, directory_fd: int) -> int:
    """Lock a directory for as long as the file descriptor is open, unless another process has done so."""
    import fcntl  # noqa: PLC0415 - other platforms have none, and this module is imported on all

    try:
        fd = os.open(_LOCK, os.O_RDWR | os.O_CREAT | _SAFE, 0o600, dir_fd=directory_fd)
    except OSError as error:
        raise _unusable(path, error) from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise SettingsError(
            [f"{_SETTING}: another daemon uses {path}; give each one a directory of its own"]
        ) from None
    except OSError as error:
        os.close(fd)
        raise _unusable(path, error) from error
    return fd


def _unusable(path: Path, error: OSError) -> SettingsError:
    if error.errno in _NO_DIRECTORY:
        problem = "it is a link or no directory; name the directory itself"
    else:
        problem = f"{error.strerror}; name a place that the daemon's user can write to"
    return SettingsError([f"{_SETTING}: {path} cannot be used: {problem}"])


def _move_descriptor(fd: int, number: int) -> None:
    """Make ``number`` mean another open file, so that other threads can go on using the number."""
    os.dup2(fd, number, inheritable=False)
    os.close(fd)


def _name(digest: bytes) -> str:
    return f"{digest.hex()}.safetensors"


def _write_all(fd: int, piece: memoryview) -> int:
    """Write all bytes, which a full disk may keep a single call from."""
    written = 0
    while written < len(piece):
        written += os.write(fd, piece[written:])
    return written
