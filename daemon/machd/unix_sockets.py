"""Sockets with a path, which only the daemon's own user can open."""

from __future__ import annotations

import fcntl
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from machd.errors import ListenError

BACKLOG = 2048
"""How many clients may wait to be accepted."""

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def listen_unix(path: Path) -> socket.socket:
    """Bind a socket at ``path`` with mode 0600, in place of one of machd's that no process serves any more.

    It listens already: one that is only bound looks to the next daemon as if no process served it.

    Raises:
        ListenError: Something else is there, a process answers, or others could put a socket of
            theirs in its place.
    """
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _refuse_unless_ours_alone(path)
        with _alone_at(path):
            _remove_stale(path)
            bound.bind(str(path))
            # Nobody connects before it listens. A mask would be the whole process's: what other
            # threads make meanwhile would lose its permissions.
            path.chmod(0o600)
            bound.listen(BACKLOG)
    except (OSError, ValueError) as error:
        bound.close()
        # A path that is too long is an OSError without a number; one with a NUL is a ValueError.
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise ListenError(f"cannot listen on unix:{path}: {reason}") from None
    except ListenError:
        bound.close()
        raise
    return bound


@contextmanager
def _alone_at(path: Path) -> Iterator[None]:
    """Keep other daemons from that path meanwhile, by a lock on a file beside it.

    Raises:
        ListenError: One of them has the lock, or the file cannot be made.
    """
    lock = path.with_name(f"{path.name}.lock")
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        descriptor = os.open(lock, flags, 0o600)
    except OSError as error:
        raise ListenError(
            f"cannot listen on unix:{path}: cannot lock {lock}: {error.strerror}"
        ) from None
    try:
        if not _takes_lock(descriptor, lock):
            raise ListenError(
                f"cannot listen on unix:{path}: another daemon is about to; choose another path"
            )
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)  # while we have it, so that no other lock goes with it
    finally:
        os.close(descriptor)


def _takes_lock(descriptor: int, lock: Path) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Its owner may have removed the file since it was opened.
        return os.path.samestat(os.fstat(descriptor), lock.lstat())
    except (BlockingIOError, FileNotFoundError):
        return False


def _refuse_unless_ours_alone(path: Path) -> None:
    """Refuse a directory that others can write to: they could replace the socket and read what clients send."""
    directory = path.parent.resolve(strict=True)
    facts = directory.stat()
    problem = None
    if facts.st_uid not in {os.geteuid(), 0}:
        problem = f"belongs to user id {facts.st_uid}"
    elif facts.st_mode & _OTHERS_WRITE and not facts.st_mode & stat.S_ISVTX:
        problem = f"can be written to by others (mode {stat.S_IMODE(facts.st_mode):04o})"
    if problem is not None:
        raise ListenError(
            f"cannot listen on unix:{path}: {directory} {problem}; use a directory of the daemon's "
            "own, mode 0700"
        )


def _remove_stale(path: Path) -> None:
    """Remove a socket of machd's that no process serves; anything else there is left alone."""
    try:
        facts = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(facts.st_mode):
        what = "a symbolic link" if stat.S_ISLNK(facts.st_mode) else "no socket"
        raise ListenError(
            f"cannot listen on unix:{path}: what is there is {what}; remove it, or choose another path"
        )
    if facts.st_uid != os.geteuid():
        raise ListenError(
            f"cannot listen on unix:{path}: the socket there belongs to user id {facts.st_uid}; "
            "remove it, or choose another path"
        )
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(0)  # a full backlog is an answer, too
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
        except BlockingIOError:
            return
