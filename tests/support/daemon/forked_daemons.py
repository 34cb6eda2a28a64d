"""Daemons that cost little to start: forked from a process that has imported all that they need.

Each is a process of its own that runs ``machd serve`` from its arguments to its exit code, so it can be
killed like any other; what it does not do is read a gigabyte of libraries first. As a program this is
their parent. It loads no model and starts no thread of MLX's, which would not live on in a child.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from support import module_command
from support.clocks.polling import CEILING_S, wait_until
from support.daemon.daemon_reports import reported


@dataclass
class ForkedDaemon:
    """A daemon, and what it logs."""

    process_id: int
    log: Path
    parent: DaemonParent
    status: int | None = None

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
        return bool(psutil.Process(self.process_id).status() == psutil.STATUS_ZOMBIE)

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
        os.kill(self.process_id, number)

    def wait(self) -> int:
        """Wait for the end; returns the exit code, negative for a signal's number."""
        if self.status is None:
            wait_until(lambda: self.has_ended, "the daemon ends", seen=self.log.read_text)
            answer = self.parent.tell({"wait": self.process_id})
            self.status = os.waitstatus_to_exitcode(int(answer))
        return self.status

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

    def __init__(self, process: subprocess.Popen[str], directory: Path) -> None:
        """Take over the parent; logs are left in ``directory``."""
        self._process = process
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
        order = {
            "arguments": arguments,
            "log": str(log),
            "max_file_bytes": max_file_bytes,
            "environ": dict(environ or {}),
        }
        return ForkedDaemon(int(self.tell(order)), log, self)

    @contextmanager
    def running(self, *arguments: str, max_file_bytes: int | None = None) -> Iterator[ForkedDaemon]:
        """One that is ready, and is stopped at the end if it still runs."""
        daemon = self.start(*arguments, max_file_bytes=max_file_bytes)
        try:
            assert daemon.url
            with reported(daemon):
                yield daemon
        finally:
            if daemon.status is None:
                daemon.stop()

    def tell(self, order: object) -> str:
        """Give the parent an order; returns its answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, "the parent lives"
        return answer


@contextmanager
def daemon_parent(directory: Path) -> Iterator[DaemonParent]:
    """The parent of daemons, which serves until it is closed."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("LME_")}
    with subprocess.Popen(
        module_command("support.daemon.forked_daemons"),
        env={**clean, "XDG_RUNTIME_DIR": str(directory)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield DaemonParent(process, directory)
        assert process.stdin is not None
        process.stdin.close()


def _serve(arguments: Sequence[str], log: str, max_file_bytes: int | None) -> None:
    """Become a daemon."""
    from machd.cli.main import main  # noqa: PLC0415 - the parent alone imports

    log_fd = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(log_fd, 2)
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    os.dup2(log_fd, 1)
    if max_file_bytes is not None:
        # Python ignores SIGXFSZ, so that what is too long is an error, as on a full disk.
        resource.setrlimit(resource.RLIMIT_FSIZE, (max_file_bytes, max_file_bytes))
    common = ["--port", "0", "--admin-listen", "127.0.0.1:0", "--logging-format", "json"]
    sys.argv[:] = ["machd", "serve", *common, *arguments]
    main()


def _main() -> None:
    import machd.cli.commands  # noqa: PLC0415
    import machd.cli.front  # noqa: F401, PLC0415
    from machd.engine.backend.mlx_lm_import import import_mlx_lm_tokenizers  # noqa: PLC0415

    import_mlx_lm_tokenizers()

    for line in sys.stdin:
        order = json.loads(line)
        if "wait" in order:
            _, answer = os.waitpid(order["wait"], 0)
        else:
            answer = os.fork()
            if answer == 0:
                os.environ.update(order["environ"])
                try:
                    _serve(order["arguments"], order["log"], order["max_file_bytes"])
                except SystemExit as end:
                    os._exit(end.code if isinstance(end.code, int) else 1)
                finally:
                    os._exit(70)
        sys.stdout.write(f"{answer}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    _main()
