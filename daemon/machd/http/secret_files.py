"""Reads files of keys and tokens, which whoever may change the settings can name."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

from machd.errors import SettingsError

__all__ = ["SecretFile", "is_there", "read_secret"]

_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
"""A pipe or a device must not keep us: every later change of the settings would wait with us."""


@dataclass(frozen=True, slots=True)
class SecretFile:
    """What was in a file.

    Attributes:
        content: All of it.
        mode: The permissions it had then.
    """

    content: bytes
    mode: int


def read_secret(path: Path, *, key: str, max_bytes: int) -> SecretFile:
    """Read a regular file at once, whatever else has that name.

    Args:
        path: Where it is; links are followed.
        key: What named it, for the error.
        max_bytes: The largest that is taken.

    Raises:
        SettingsError: It cannot be read, is no file or is larger. Its content is never quoted.
    """
    try:
        with open(path, "rb", opener=_open_at_once) as file:
            facts = os.fstat(file.fileno())
            if not stat.S_ISREG(facts.st_mode):
                raise _unreadable(key, path, "it is no regular file")
            content = file.read(max_bytes + 1)
    except (OSError, ValueError) as error:
        raise _unreadable(key, path, _reason(error)) from None
    if len(content) > max_bytes:
        raise _unreadable(key, path, f"it has more than {max_bytes} bytes")
    return SecretFile(content, stat.S_IMODE(facts.st_mode))


def is_there(path: Path, *, key: str) -> bool:
    """Whether there is anything of that name, also what cannot be read.

    Raises:
        SettingsError: Nobody can tell.
    """
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError) as error:
        raise _unreadable(key, path, _reason(error)) from None
    return True


def _open_at_once(path: str, _flags: int) -> int:
    return os.open(path, _FLAGS)


def _unreadable(key: str, path: Path, reason: str) -> SettingsError:
    return SettingsError([f"{key}: cannot read {path}: {reason}"])


def _reason(error: OSError | ValueError) -> str:
    # A path with a NUL in it is a ValueError.
    return (error.strerror or str(error)) if isinstance(error, OSError) else "no path is like that"
