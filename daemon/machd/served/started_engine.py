"""A started engine process and the front's end of its link.

Imports little, so that a front can start the process before it imports its own libraries.
"""

from __future__ import annotations

import errno
import os
import socket
import subprocess
from collections.abc import Sequence
from contextlib import ExitStack, suppress

from machd.errors import EngineFaultError
from machd.link.frames import Frames
from machd.served.error_output import ErrorOutput, own_error_output


class StartedEngine:
    """One process that has been told which model to serve.

    Attributes:
        process: To be ended and waited for.
        frames: To be closed after that. A process whose front is gone ends by itself.
        error_output: What the process writes to standard error, but its log.
    """

    def __init__(self, command: Sequence[str], settings_json: str, name: str = "") -> None:
        """Start it.

        Args:
            command: Of the program, which gets two numbers of descriptors as its last arguments: its end of the link,
                and this process's standard error, for its log.
            settings_json: The settings in force, with which the link begins.
            name: The model's among others; empty for the only one.

        Raises:
            OSError: The system has no room for it.
        """
        with ExitStack() as on_error:
            ours, theirs = socket.socketpair()
            on_error.callback(ours.close)
            with theirs:
                log = own_error_output()
                on_error.callback(os.close, log)
                self.process = subprocess.Popen(  # noqa: S603 - our own module
                    [*command, str(theirs.fileno()), str(log)],
                    stdin=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    pass_fds=[theirs.fileno(), log],
                )
            on_error.callback(self._kill)
            assert self.process.stderr is not None, "asked for"
            on_error.callback(self.process.stderr.close)
            try:
                self.error_output = ErrorOutput(self.process.stderr, log)
            except RuntimeError as error:
                raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN)) from error
            on_error.pop_all()
        self.frames = Frames(ours)
        with suppress(
            OSError
        ):  # a process that has ended already: the reader of the link sees that
            self.frames.send([settings_json.encode(), name.encode()])

    def _kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def discard(self) -> None:
        """End the process at once, and give back what it had here."""
        self._kill()
        self.frames.close()


def cannot_start(error: OSError) -> EngineFaultError:
    """Return the error that ends a daemon which has no engine process yet."""
    return EngineFaultError(f"the engine process cannot be started: {error.strerror}")
