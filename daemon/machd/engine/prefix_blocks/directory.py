"""The directory of the disk tier: private, and one daemon's at a time.

It has a sub-directory for each key, so that models, formats and versions never meet. Two daemons
cannot share it: each would count its own files alone, so together they would go over the budget, and
each would delete what the other relies on. A lock file says whose it is; the kernel lets go of the
lock when the process ends, however it ends.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from contextlib import suppress
from pathlib import Path

from machd.engine.prefix_blocks.key_directory import KeyDirectory
from machd.errors import SettingsError

_SETTING = "cache.disk_dir"
_LOCK = "lock"
_KEY = re.compile(r"(?:[0-9a-f]{2}){1,64}")
_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_LOCK_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC


def check_block_directory(path: Path) -> None:
    """Make the directory if it is not there, and see that a :class:`BlockDirectory` could use it.

    Raises:
        SettingsError: It could not.
    """
    BlockDirectory(path).close()


class BlockDirectory:
    """A locked directory of all keys."""

    def __init__(self, path: Path) -> None:
        """Make what is missing of it, mode 0700, and lock it.

        Raises:
            SettingsError: It is a link or no directory, belongs to another user, is open to others,
                cannot be written, or another daemon uses it.
        """
        self._path = path
        self._fd = _open_root(path)
        try:
            self._lock_fd = _lock(path, self._fd)
        except SettingsError:
            os.close(self._fd)
            raise

    def of_key(self, key: bytes) -> KeyDirectory:
        """The sub-directory of a key.

        Raises:
            SettingsError: There is something else of that name, or it cannot be made.
        """
        return KeyDirectory(self._open_key(key), lambda: self._reopen_key(key))

    def _reopen_key(self, key: bytes) -> int:
        """Make again what was removed while it was in use: the directory, its lock, a key's part."""
        if not self._is_in_place():
            fd = _open_root(self._path)
            try:
                lock_fd = _lock(self._path, fd)
                # The numbers stay, so that other threads can go on using them.
                os.dup2(lock_fd, self._lock_fd, inheritable=False)
                os.close(lock_fd)
                os.dup2(fd, self._fd, inheritable=False)
            finally:
                os.close(fd)
        return self._open_key(key)

    def _open_key(self, key: bytes) -> int:
        path = self._path / key.hex()
        try:
            with suppress(FileExistsError):
                os.mkdir(path.name, 0o700, dir_fd=self._fd)
            return _open_private(path, self._fd)
        except OSError as error:
            raise _unusable(path, error) from error

    def _is_in_place(self) -> bool:
        """Whether the directory and the lock are those that the paths lead to."""
        try:
            lock = os.stat(_LOCK, dir_fd=self._fd, follow_symlinks=False)
            return os.path.samestat(self._path.lstat(), os.fstat(self._fd)) and os.path.samestat(
                lock, os.fstat(self._lock_fd)
            )
        except OSError:
            return False

    def keys(self) -> list[bytes]:
        """All that have a sub-directory, or something else of its name."""
        with os.scandir(self._fd) as entries:
            return [bytes.fromhex(entry.name) for entry in entries if _KEY.fullmatch(entry.name)]

    def found(self, key: bytes) -> KeyDirectory:
        """The sub-directory of a key, which is not made if it is not there.

        Raises:
            OSError, SettingsError: It is not there, is something else, or cannot be used.
        """
        return KeyDirectory(_open_private(self._path / key.hex(), self._fd))

    def remove(self, key: bytes) -> None:
        """Remove the sub-directory of a key, if nothing is in it; that it cannot be is no fault."""
        with suppress(OSError):
            os.rmdir(key.hex(), dir_fd=self._fd)

    def close(self) -> None:
        """Let go of the lock."""
        os.close(self._lock_fd)
        os.close(self._fd)


def _open_root(path: Path) -> int:
    try:
        for missing in [one for one in (path, *path.parents) if not os.path.lexists(one)][::-1]:
            missing.mkdir(mode=0o700, exist_ok=True)
        return _open_private(path)
    except ValueError:
        raise SettingsError([f"{_SETTING}: no path is like that; name another"]) from None
    except OSError as error:
        raise _unusable(path, error) from error


def _open_private(path: Path, parent_fd: int | None = None) -> int:
    """Open a directory that is ours alone.

    Raises:
        OSError: It cannot be opened, is a link, or no directory.
        SettingsError: It is not ours alone.
    """
    fd = os.open(path if parent_fd is None else path.name, _DIRECTORY, dir_fd=parent_fd)
    facts = os.fstat(fd)
    problem: str | None = None
    if facts.st_uid != os.geteuid():
        problem = f"it is owned by user id {facts.st_uid}; name a directory of the daemon's user"
    elif facts.st_mode & _OTHERS:
        mode = stat.S_IMODE(facts.st_mode)
        problem = f"others may enter it (mode {mode:04o}); it holds prompts: run chmod 700 on it"
    if problem is None:
        return fd
    os.close(fd)
    raise SettingsError([f"{_SETTING}: {path} cannot be used: {problem}"])


def _lock(path: Path, directory_fd: int) -> int:
    """Lock a directory for as long as the file descriptor is open.

    Raises:
        SettingsError: Another process has done so, or it cannot be done there.
    """
    import fcntl  # noqa: PLC0415 - other platforms have none, and this module is imported on all

    try:
        fd = os.open(_LOCK, _LOCK_FLAGS, 0o600, dir_fd=directory_fd)
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
    if error.errno in {errno.ELOOP, errno.ENOTDIR, errno.EEXIST}:
        problem = "it is a link or no directory; name the directory itself"
    else:
        problem = f"{error.strerror}; name a place that the daemon's user can write to"
    return SettingsError([f"{_SETTING}: {path} cannot be used: {problem}"])
