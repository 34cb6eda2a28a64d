"""A started engine process and the front's end of its link.

Imports little, so that a front can start the process before it imports its own libraries.
"""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Sequence
from contextlib import suppress

from machd.errors import EngineFaultError
from machd.link.frames import Frames


class StartedEngine:
    """One process that has been told which model to serve.

    Attributes:
        process: To be ended and waited for.
        frames: To be closed after that. A process whose front is gone ends by itself.
    """

    def __init__(self, command: Sequence[str], settings_json: str) -> None:
        """Start it.

        Args:
            command: Of the program, which gets the number of its end of the link as the last argument.
            settings_json: The settings in force, with which the link begins.

        Raises:
            OSError: The system has no room for it.
        """
        ours, theirs = socket.socketpair()
        try:
            self.process = subprocess.Popen(  # noqa: S603 - our own module
                [*command, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        self.frames = Frames(ours)
        with suppress(
            OSError
        ):  # a process that has ended already: the reader of the link sees that
            self.frames.send([settings_json.encode()])

    def discard(self) -> None:
        """End the process at once, and give back what it had here."""
        self.process.kill()
        self.process.wait()
        self.frames.close()


def cannot_start(error: OSError) -> EngineFaultError:
    """Return the error that ends a daemon which has no engine process yet."""
    return EngineFaultError(f"the engine process cannot be started: {error.strerror}")
