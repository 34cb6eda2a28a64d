"""``machd serve`` on a Unix socket, as a program that is told to stop in the moment before it binds it."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from machd import unix_sockets
from machd.cli.main import main as machd


def main() -> None:
    """Serve with the command's arguments."""
    remove = unix_sockets._remove_stale

    def signalled(path: Path) -> None:
        remove(path)
        os.kill(os.getpid(), signal.SIGTERM)

    setattr(unix_sockets, "_remove_stale", signalled)  # noqa: B010 - between two lines of the daemon
    sys.argv[1:] = ["serve", *sys.argv[1:]]
    machd()


if __name__ == "__main__":
    main()
