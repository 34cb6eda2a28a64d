"""``machd serve`` as a real process on a free port."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Self

import psutil

from support.clocks.polling import CEILING_S
from support.daemon.daemon_reports import reported
from support.daemon.engine_processes import children_of
from support.daemon.forked_programs import STARTED, ForkedProgram


class ServeProcess:
    """A context manager: inside it the daemon is ready at ``url``."""

    def __init__(
        self,
        *arguments: str,
        environ: Mapping[str, str] | None = None,
        ulimit: str | None = None,
        program: Sequence[str] = (sys.executable, "-m", "machd"),
        is_forked: bool = True,
    ) -> None:
        """Prepare ``machd serve`` with more arguments and variables.

        Args:
            arguments: Added to the command line.
            environ: Added to this process's variables.
            ulimit: A limit for the process, as the shell's ``ulimit`` takes it: ``-n 256``.
            program: The command that is machd.
            is_forked: Start it at the cost of a fork, where that can be done; else as a shell does.
        """
        limited = ["sh", "-c", f'ulimit {ulimit}; exec "$@"', "sh"] if ulimit else []
        self._command = [
            *limited,
            *program, "serve", "--port", "0", "--admin-listen", "127.0.0.1:0",
            "--logging-format", "json", *arguments,
        ]  # fmt: skip
        self._popen = ForkedProgram if is_forked else STARTED
        self._environ = {**_clean_environ(), **(environ or {})}
        self._lines: queue.Queue[dict[str, object] | None] = queue.Queue()
        self.events: list[dict[str, object]] = []
        self.output: list[str] = []
        self.url = ""

    def __enter__(self) -> Self:
        """Start and wait until requests are taken."""
        with ExitStack() as until_ready:
            until_ready.enter_context(self.started())
            self.url = str(self.wait_for("daemon.ready")["url"])
            self._running = until_ready.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None:
        """Stop, by force if it must be."""
        self._running.__exit__(kind, error, traceback)

    @contextmanager
    def started(self) -> Iterator[Self]:
        """Start without waiting for the model."""
        self.process = self._popen(
            self._command, env=self._environ, stderr=subprocess.PIPE, text=True
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        try:
            with reported(self):
                yield self
        finally:
            self._stop()

    def _stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(CEILING_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._reader.join(CEILING_S)
        assert self.process.stderr is not None
        self.process.stderr.close()

    def log_tail(self, lines: int) -> Sequence[str]:
        """The last lines of what it wrote to stderr."""
        return self.output[-lines:]

    @property
    def admin_url(self) -> str:
        """Return where operators are answered; read once the daemon is ready."""
        events = (one for one in self.events if one["event"] == "daemon.listening")
        return str(next(events)["admin_url"])

    def wait_for(self, event: str) -> dict[str, object]:
        """The first log line of that event that has not been passed yet.

        Raises:
            AssertionError: The daemon ended first, or ``CEILING_S`` passed without a line.
        """
        while True:
            try:
                line = self._lines.get(timeout=CEILING_S)
            except queue.Empty:
                raise AssertionError(f"no {event} within {CEILING_S:g} s") from None
            assert line is not None, f"the daemon ended before {event}"
            if line["event"] == event:
                return line

    def take_lines(self) -> list[str]:
        """Take the log lines since the last call out of memory; no other method finds them again."""
        count = len(self.output)
        taken, self.output[:count] = self.output[:count], []
        self.events.clear()
        while not self._lines.empty():
            self._lines.get_nowait()
        return taken

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.process.send_signal(signal.SIGTERM)

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.output.append(line)
            if line.startswith("{"):
                event = json.loads(line)
                self.events.append(event)
                self._lines.put(event)
        self._lines.put(None)


def servers_of_this_process() -> list[psutil.Process]:
    """The daemons among this process's children, those of fixtures included."""
    return children_of(os.getpid(), "serve")


def _clean_environ() -> dict[str, str]:
    """This process's variables without any of machd's."""
    variables = os.environ
    return {name: value for name, value in variables.items() if not name.startswith("LME_")}
