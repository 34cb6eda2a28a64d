"""A started engine process and the front's end of its link.

Imports few modules, so that a front can start the process before it imports its own libraries.
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
    """A started process with its settings, pipes and link.

    Attributes:
        process: The process; its owner ends it and waits for it.
        frames: The front's end of the link, closed after the process has ended. A process without its front ends itself.
        error_output: The process's standard error, without its log.
    """

    def __init__(self, command: Sequence[str], settings_json: str, name: str = "") -> None:
        """Start it.

        Args:
            command: Of the program, which gets two numbers of descriptors as its last arguments: its end of the link,
                and this process's standard error, for its log.
            settings_json: The settings in force, with which the link begins.
            name: The model's among others; empty for the only one.

        Raises:
            OSError: The system has no room for a process.
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
        """Kill the process, and close its descriptors."""
        self._kill()
        self.frames.close()


def cannot_start(error: OSError) -> EngineFaultError:
    """Return the error for a daemon that cannot start its first engine process."""
    return EngineFaultError(f"the engine process cannot be started: {error.strerror}")
