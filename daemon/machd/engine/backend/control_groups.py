"""This process's control groups, of version 2 and of version 1: where the kernel says what it may take."""

from __future__ import annotations

import os
import sys
from functools import lru_cache
from pathlib import Path, PurePosixPath

NO_SUCH_FILE = (FileNotFoundError, NotADirectoryError, PermissionError)
"""A group without the controller, or outside of what the process may see. Any other error is a reading that failed, which must
not pass for a group without a limit."""


def control_groups(controller: str, root: Path = Path("/")) -> tuple[Path, ...]:
    """Return the folders of the process's groups and of those around them; none on systems without them.

    Raises:
        OSError: The list of groups cannot be read.
    """
    if sys.platform != "linux":
        return ()
    try:
        listed = _content(str(root / "proc/self/cgroup"))
    except NO_SUCH_FILE:
        return ()
    return _folders(listed.decode("utf-8", "replace"), controller, root)


def group_text(group: Path, *names: str) -> str | None:
    """Return what the first of a group's files says that it has; None if it has none of them.

    Raises:
        OSError: A file cannot be read.
    """
    for name in names:
        try:
            return _content(f"{group}/{name}").decode("ascii")
        except NO_SUCH_FILE:
            continue
    return None


@lru_cache(maxsize=16)
def _folders(listed: str, controller: str, root: Path) -> tuple[Path, ...]:
    """Read a list of groups; it is nearly always the one that was read last."""
    mounts = root / "sys/fs/cgroup"
    folders: list[Path] = []
    for line in listed.splitlines():
        _, controllers, path = line.split(":", 2)
        # Version 2 has one hierarchy without names; version 1 one for each set of controllers.
        if not controllers:
            mount = mounts
        elif controller in controllers.split(","):
            mount = mounts / controller
        else:
            continue
        # In a container the path may be the host's: then only the mount's own files exist.
        group = PurePosixPath(path)
        folders += [mount / folder.relative_to("/") for folder in (group, *group.parents)]
    return tuple(folders)


def _content(path: str) -> bytes:
    """Read a file whole; a step looks at ten of these, and Python's own files cost several times as much."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        pieces = []
        while piece := os.read(file, 1 << 16):
            pieces.append(piece)
        return b"".join(pieces)
    finally:
        os.close(file)
