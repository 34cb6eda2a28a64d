"""Daemons whose log is a file: each can be killed, and its log is read to its last line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from support.clocks.polling import CEILING_S, wait_until
from support.daemon.daemon_reports import reported
from support.daemon.forked_programs import ForkedProgram


@dataclass
class ForkedDaemon:
    """A daemon, and what it logs."""

    process: subprocess.Popen[Any]
    log: Path

    @property
    def process_id(self) -> int:
        """Return the number of the process."""
        return self.process.pid

    @property
    def events(self) -> list[dict[str, Any]]:
        """Return what it has logged."""
        lines = self.log.read_text().splitlines(keepends=True)
        return [json.loads(one) for one in lines if one.startswith("{") and one.endswith("\n")]

    @property
    def url(self) -> str:
        """Return where it listens; waits until it is ready."""
        ready = self.wait_for("daemon.ready")
        return str(ready["url"])

    def wait_for(self, event: str) -> dict[str, Any]:
        """The first event of that name; fails at once if the daemon ends without it."""

        def is_over() -> bool:
            has_ended = self.has_ended  # read first: a last line may come before the end
            return any(one["event"] == event for one in self.events) or has_ended

        wait_until(is_over, event, seen=self.log.read_text)
        found = [one for one in self.events if one["event"] == event]
        assert found, f"no {event}:\n{self.log.read_text()}"
        return found[0]

    @property
    def has_ended(self) -> bool:
        """Return whether the process is over, and only its exit code is left."""
        return self.process.poll() is not None

    def log_tail(self, lines: int) -> Sequence[str]:
        """The last lines of its log."""
        return self.log.read_text().splitlines()[-lines:]

    @property
    def admin(self) -> httpx.Client:
        """A client of its admin API, to be closed."""
        url = str(self.wait_for("daemon.listening")["admin_url"])
        token = self.log.parent / "machd" / f"admin-{url.rpartition(':')[2]}.token"
        return httpx.Client(
            base_url=url, headers={"Authorization": f"Bearer {token.read_text().strip()}"}
        )

    def change(self, path: str, change: dict[str, object]) -> None:
        """PATCH the settings, or POST an order, on the admin API."""
        with self.admin as admin:
            method = "PATCH" if path == "/admin/config" else "POST"
            answer = admin.request(method, path, json=change, timeout=CEILING_S)
        assert answer.status_code == 200, answer.text

    def signal(self, number: int) -> None:
        """Send a signal."""
        self.process.send_signal(number)

    def wait(self) -> int:
        """Wait for the end; returns the exit code, negative for a signal's number."""
        wait_until(lambda: self.has_ended, "the daemon ends", seen=self.log.read_text)
        return int(self.process.returncode)

    def kill(self) -> None:
        """Kill -9, and see that it had lived until then."""
        self.signal(signal.SIGKILL)
        assert self.wait() == -signal.SIGKILL, self.log.read_text()

    def stop(self) -> int:
        """SIGTERM, and wait for the end."""
        self.signal(signal.SIGTERM)
        return self.wait()


class DaemonParent:
    """Starts daemons; the caller waits for the end of each."""

    def __init__(self, directory: Path) -> None:
        """Prepare to start some; logs are left in ``directory``."""
        self._directory = directory
        self._count = 0

    def start(
        self,
        *arguments: str,
        max_file_bytes: int | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> ForkedDaemon:
        """Start ``machd serve``.

        Args:
            arguments: Added to the command line.
            max_file_bytes: The largest file that it can write.
            environ: Added to its variables.
        """
        self._count += 1
        log = self._directory / f"daemon-{self._count}.log"
        log.touch(0o600)
        clean = {name: value for name, value in os.environ.items() if not name.startswith("LME_")}
        common = ["--port", "0", "--admin-listen", "127.0.0.1:0", "--logging-format", "json"]
        with log.open("ab") as output:
            process = ForkedProgram(
                [sys.executable, "-P", "-m", "machd", "serve", *common, *arguments],
                env={**clean, "XDG_RUNTIME_DIR": str(self._directory), **(environ or {})},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                max_file_bytes=max_file_bytes,
            )
        return ForkedDaemon(process, log)

    @contextmanager
    def running(self, *arguments: str, max_file_bytes: int | None = None) -> Iterator[ForkedDaemon]:
        """One that is ready, and is stopped at the end if it still runs."""
        daemon = self.start(*arguments, max_file_bytes=max_file_bytes)
        try:
            assert daemon.url
            with reported(daemon):
                yield daemon
        finally:
            if not daemon.has_ended:
                daemon.stop()


@contextmanager
def daemon_parent(directory: Path) -> Iterator[DaemonParent]:
    """What starts daemons with their logs in a directory."""
    yield DaemonParent(directory)
