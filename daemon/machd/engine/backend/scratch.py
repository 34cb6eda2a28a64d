"""A directory for run-time compiled code that no other user can write to.

On the CPU mlx compiles C++ at run time and loads ``.so`` files from ``$TMPDIR/mlx``, reusing what
already lies there: write access to that directory is code execution as this process.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import MutableMapping
from pathlib import Path

from machd.errors import StartupError

_NAME = "scratch"
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def private_scratch_directory(base: Path) -> Path:
    """Make or check the directory ``scratch`` under ``base``, mode 0700 and owned by this user.

    ``base`` and missing parents are made with mode 0700 too. ``base`` itself must be owned by this user
    and closed to other writers; above it, only directories made here are checked.

    Raises:
        StartupError: One of them is a symbolic link, no directory, owned by another, or writable
            by group or others; or it cannot be made.
    """
    missing = [path for path in (base, *base.parents) if not os.path.lexists(path)]
    directory = base / _NAME
    for path in (*reversed(missing), directory):
        _make(path)
    for path in dict.fromkeys((*reversed(missing), base, directory)):
        _refuse_unless_private(path)
    # A directory of an earlier run may be readable by others; that harms nothing but is not 0700.
    directory.chmod(0o700)
    return directory


def use_scratch_directory(directory: Path, environ: MutableMapping[str, str]) -> None:
    """Make ``directory`` the place for temporary files, before mlx is imported."""
    environ["TMPDIR"] = str(directory)
    # tempfile may have read the old value already and never looks again.
    tempfile.tempdir = str(directory)


def _make(path: Path) -> None:
    try:
        path.mkdir(mode=0o700, exist_ok=True)
    except FileExistsError:
        raise StartupError(
            f"scratch directory: {path} is not a directory; remove it or choose another place"
        ) from None
    except OSError as error:
        raise StartupError(
            f"scratch directory: cannot make {path} ({error.strerror}); choose a place that the "
            "daemon's user can write to"
        ) from error


def _refuse_unless_private(path: Path) -> None:
    facts = path.lstat()
    problem: str | None = None
    if stat.S_ISLNK(facts.st_mode):
        problem = "is a symbolic link"
    elif not stat.S_ISDIR(facts.st_mode):
        problem = "is not a directory"
    elif facts.st_uid != os.geteuid():
        problem = f"is owned by user id {facts.st_uid}"
    elif facts.st_mode & _OTHERS_WRITE:
        problem = f"can be written to by others (mode {stat.S_IMODE(facts.st_mode):04o})"
    if problem is not None:
        raise StartupError(
            f"scratch directory: {path} {problem}; code compiled there would not be safe to load: "
            "remove it, or choose another place"
        )
