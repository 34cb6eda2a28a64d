"""Read files that a person or a stranger can name: regular files only, and never without a bound.

Opening a named pipe blocks until a writer comes, and some devices have no end. Every reader of a
named file (settings, keys, tokens, templates, checkpoints) opens it here.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY


class IrregularFileError(OSError):
    """A file that is not read: a pipe, a device or a folder; or larger than its reader's bound."""

    def __init__(self, reason: str) -> None:
        """Take the reason as it continues "cannot read PATH: "."""
        super().__init__(0, reason)


@dataclass(frozen=True, slots=True)
class RegularFile:
    """The content of a file and the permissions that it had when it was read."""

    content: bytes
    mode: int


def open_regular(path: Path, *, follows_links: bool = True) -> BinaryIO:
    """Open a regular file to read bytes.

    Args:
        path: Of the file.
        follows_links: Whether ``path`` may be a symbolic link; links among its folders always count.

    Raises:
        IrregularFileError: A pipe, a device or a folder, or a path that no file can have.
        OSError: As ``open`` raises it.
    """
    try:
        # Opening a device may already act on it.
        _check_regular(path.stat(follow_symlinks=follows_links).st_mode)
        descriptor = os.open(path, _FLAGS if follows_links else _FLAGS | os.O_NOFOLLOW)
    except ValueError:
        raise IrregularFileError("no file can have this path") from None  # a NUL or a surrogate
    try:
        _check_regular(os.fstat(descriptor).st_mode)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_regular(path: Path, *, max_bytes: int) -> RegularFile:
    """Read a regular file of at most ``max_bytes``.

    Raises:
        IrregularFileError: It is larger, or as for :func:`open_regular`.
        OSError: As ``open`` raises it.
    """
    with open_regular(path) as file:
        mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise IrregularFileError(f"it is larger than {_size_text(max_bytes)}")
    return RegularFile(content, mode)


def _check_regular(mode: int) -> None:
    if not stat.S_ISREG(mode):
        raise IrregularFileError("it is not a regular file")


def _size_text(size_bytes: int) -> str:
    if size_bytes >= 1 << 20:
        return f"{size_bytes >> 20} MiB"
    return f"{size_bytes} bytes"
