"""The daemon's end of the worker process that measures a stand-in."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence

import msgspec

from machd.capabilities.evidence import MeasuredOn, Outcome, ProbeResult
from machd_probes.runner import WORKER_COMMAND
from machd_probes.worker import STAND_IN_FLAG
from machd_probes.worker_messages import CheckFinished, StandInOrder, decode_message

_LOWER_PRIORITY = 10
"""Niceness of the worker, of 19."""

_FAULTS = frozenset({signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL})
"""Signals of a crash; others, such as SIGKILL, come from outside."""


class StandInProcess:
    """A worker process that runs until all checks are done."""

    def __init__(
        self,
        order: StandInOrder,
        environ: Mapping[str, str],
        keep: Callable[[ProbeResult], None],
        *,
        command: Sequence[str] = WORKER_COMMAND,
    ) -> None:
        """Start it.

        Args:
            order: What it measures.
            environ: Its whole environment.
            keep: Takes each result as it comes, on a thread of its own.
            command: Starts a worker; the flag for a stand-in is appended.

        Raises:
            OSError: It cannot be started.
        """
        self._order = order
        self._keep = keep
        self._changed = threading.Condition()
        self._done: list[str] = []
        self._is_running = True
        self._process = subprocess.Popen(  # noqa: S603 - our own command
            [*command, STAND_IN_FLAG],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=dict(environ),
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, name="machd-stand-in", daemon=True)
        self._reader.start()

    @property
    def is_running(self) -> bool:
        """Return whether more results may come."""
        return self._is_running

    def has_measured(self, name: str, *, within_s: float) -> bool:
        """Wait for a check's result; whether it is there, or may still come after that time."""
        with self._changed:
            self._changed.wait_for(lambda: name in self._done or not self._is_running, within_s)
            return self._is_running or bool(self._done)

    def yield_to_requests(self) -> None:
        """Lower the worker's priority below that of requests."""
        if hasattr(os, "setpriority"):
            try:
                os.setpriority(os.PRIO_PROCESS, self._process.pid, _LOWER_PRIORITY)
            except OSError:  # it has ended
                return

    def close(self) -> None:
        """End it at once."""
        self._process.kill()
        self._reader.join()

    def _read(self) -> None:
        assert self._process.stdin is not None, "a pipe"
        assert self._process.stdout is not None, "a pipe"
        try:
            with self._process.stdin as stdin:
                stdin.write(msgspec.json.encode(self._order))
        except BrokenPipeError:
            pass
        with self._process.stdout as stdout:
            for line in stdout:
                message = decode_message(line)
                if isinstance(message, CheckFinished):
                    self._take(message.result)
        self._note_crash(self._process.wait())
        with self._changed:
            self._is_running = False
            self._changed.notify_all()

    def _note_crash(self, code: int) -> None:
        """Count a crash as a failed check: the loaded model may crash the daemon the same way."""
        left = [name for name in self._order.checks if name not in self._done]
        if left and -code in _FAULTS:
            detail = f"the process that measured it crashed with {signal.Signals(-code).name}"
            self._take(
                ProbeResult(left[0], Outcome.FAILED, detail, measured_on=MeasuredOn.STAND_IN)
            )

    def _take(self, result: ProbeResult) -> None:
        self._keep(result)
        with self._changed:
            self._done.append(result.probe)
            self._changed.notify_all()
