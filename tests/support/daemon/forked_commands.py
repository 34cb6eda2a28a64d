"""``machd ctl`` and its like at the cost of a fork: importing what they need takes a second each time.

As a program this is the parent: it imports the commands, starts no thread, and forks one child an
order, which runs the entry point with the order's arguments, variables and streams.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from support import module_command
from support.clocks.polling import CEILING_S


def run_machd(
    arguments: Sequence[str],
    environ: Mapping[str, str] | None = None,
    *,
    stdin: str | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a command of machd to its end.

    Args:
        arguments: The command line after ``machd``.
        environ: Added to this process's variables, from which machd's own are left out.
        stdin: What it reads.

    Raises:
        AssertionError: It takes longer than ``CEILING_S``; its streams so far are in the message.
    """
    clean = {name: value for name, value in os.environ.items() if not name.startswith("LME_")}
    with tempfile.TemporaryDirectory(prefix="machd-command-") as folder:
        streams = [Path(folder) / name for name in ("stdin", "stdout", "stderr")]
        for stream in streams:
            stream.write_text(stdin or "" if stream.name == "stdin" else "", "utf-8")
        exit_code = _parent().run(
            {
                "arguments": list(arguments),
                "environ": {**clean, **(environ or {})},
                "folder": str(Path.cwd()),
                "streams": list(map(str, streams)),
            }
        )
        stdout, stderr = (stream.read_text("utf-8") for stream in streams[1:])
    assert exit_code is not None, f"{arguments} has not ended:\n{stdout}{stderr}"
    return subprocess.CompletedProcess(["machd", *arguments], exit_code, stdout, stderr)


class _Parent:
    """The parent process, which runs commands one after the other."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            module_command("support.daemon.forked_commands"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._lock = threading.Lock()
        atexit.register(self.close)

    def run(self, order: object) -> int | None:
        """Run a command; returns its exit code, None where it was killed at the ceiling."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._lock:
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
            answer: int | None = json.loads(self._process.stdout.readline())
        return answer

    def close(self) -> None:
        """End it."""
        self._process.communicate()


@functools.cache
def _parent() -> _Parent:
    return _Parent()


def _become(arguments: list[str], environ: dict[str, str], folder: str, streams: list[str]) -> None:
    """Run a command in this process."""
    from machd.cli.main import main  # noqa: PLC0415 - the parent alone imports

    for number, (stream, flags) in enumerate(
        zip(
            streams,
            (os.O_RDONLY, os.O_WRONLY | os.O_APPEND, os.O_WRONLY | os.O_APPEND),
            strict=True,
        )
    ):
        os.dup2(os.open(stream, flags), number)
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(folder)
    sys.argv[:] = ["machd", *arguments]
    main()


def _wait(process_id: int) -> int | None:
    """The exit code of a child, as ``subprocess`` tells it; None where it had to be killed."""
    import signal  # noqa: PLC0415 - the parent alone

    signal.signal(signal.SIGALRM, lambda *_: os.kill(process_id, signal.SIGKILL))
    signal.setitimer(signal.ITIMER_REAL, CEILING_S)
    exit_code = os.waitstatus_to_exitcode(os.waitpid(process_id, 0)[1])
    is_late = signal.setitimer(signal.ITIMER_REAL, 0)[0] == 0
    return None if is_late else exit_code


def _main() -> None:
    import machd.cli.commands  # noqa: PLC0415
    import machd.cli.config  # noqa: PLC0415
    import machd.cli.ctl  # noqa: F401, PLC0415

    for line in sys.stdin:
        process_id = os.fork()
        if process_id == 0:
            try:
                _become(**json.loads(line))
            except SystemExit as end:
                os._exit(end.code if isinstance(end.code, int) else 1)
            finally:
                os._exit(70)
        sys.stdout.write(f"{json.dumps(_wait(process_id))}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    _main()
