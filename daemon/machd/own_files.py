"""Files that stand for as long as a daemon runs, sockets among them: removed by it, never by another."""

from __future__ import annotations

from pathlib import Path


class OwnFile:
    """The file at a path now, to be removed later if it is still the same."""

    def __init__(self, path: Path) -> None:
        """Remember what is at ``path``; call it once it is complete."""
        self.path = path
        self._identity = _identity(path)

    def remove(self) -> None:
        """Remove it unless it is gone or was replaced."""
        if self._identity is not None and _identity(self.path) == self._identity:
            self.path.unlink(missing_ok=True)


def _identity(path: Path) -> tuple[int, int, int] | None:
    """Which file is there; None where there is none."""
    try:
        facts = path.lstat()
    except OSError:
        return None
    # With the time: a file system may give the number of a removed file to the next one.
    return facts.st_dev, facts.st_ino, facts.st_mtime_ns
