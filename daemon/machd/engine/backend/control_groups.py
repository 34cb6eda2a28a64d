"""This process's control groups, of version 2 and of version 1: where the kernel says what it may take."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

NO_SUCH_FILE = (FileNotFoundError, NotADirectoryError, PermissionError)
"""A group without the controller, or outside of what the process may see. Any other error is a reading that failed, which must
not pass for a group without a limit."""


def control_groups(controller: str, root: Path = Path("/")) -> Iterator[Path]:
    """Yield the folders of the process's groups and of those around them; none on systems without them.

    Raises:
        OSError: The list of groups cannot be read.
    """
    if sys.platform != "linux":
        return
    try:
        lines = (root / "proc/self/cgroup").read_text("utf-8", "replace").splitlines()
    except NO_SUCH_FILE:
        return
    mounts = root / "sys/fs/cgroup"
    for line in lines:
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
        for folder in (group, *group.parents):
            yield mount / folder.relative_to("/")


def group_text(group: Path, *names: str) -> str | None:
    """Return what the first of a group's files says that it has; None if it has none of them.

    Raises:
        OSError: A file cannot be read.
    """
    for name in names:
        try:
            return (group / name).read_text("ascii")
        except NO_SUCH_FILE:
            continue
    return None
