"""Probes architectures in processes of their own, so that what breaks one row breaks no other."""

from __future__ import annotations

import asyncio
import os
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from machd.capabilities.matrix import ArchitectureReport
from machd.errors import StartupError
from machd_probes.progress import RunProgress
from machd_probes.worker_messages import WorkerFinished, WorkerReady, faulted, shortened
from machd_probes.worker_process import WorkerProcess

WORKER_COMMAND = (sys.executable, "-P", "-m", "machd_probes.worker")
"""With ``-P``, so that no file of the current directory is taken for a module."""

_THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)


@dataclass(frozen=True, slots=True)
class RunnerLimits:
    """Limits on parallel work and on its duration.

    Attributes:
        start_s: From starting a worker to its first message.
        architecture_s: For one architecture on the CPU.
        compiling_architecture_s: The same on a GPU, where mlx compiles kernels that it meets for the first
            time: 14 of a llama in 40 s on CUDA (H200, 16 cores). Later runs find them on disk.
        end_s: From closing its output to being gone.
        workers: Processes at a time.
        group: Architectures a process; importing mlx-lm takes 1 s of each.
    """

    start_s: float = 60.0
    architecture_s: float = 60.0
    compiling_architecture_s: float = 600.0
    end_s: float = 5.0
    workers: int = min(2, os.cpu_count() or 1)
    group: int = 16

    def of_architecture_s(self, backend: str) -> float:
        """Return the limit for one architecture on ``cpu``, ``metal`` or ``cuda``."""
        if backend == "cpu":
            return self.architecture_s
        return max(self.architecture_s, self.compiling_architecture_s)


class Runner:
    """Runs workers over the names of architectures."""

    def __init__(
        self,
        environ: Mapping[str, str],
        *,
        command: Sequence[str] = WORKER_COMMAND,
        limits: RunnerLimits | None = None,
    ) -> None:
        """Prepare; nothing runs yet.

        Args:
            environ: Of this process; workers get it with as many threads as two can share.
            command: Starts a worker; names of architectures are appended.
            limits: Limits on parallel work and on its duration.
        """
        self._command = tuple(command)
        self._limits = limits or RunnerLimits()
        threads = max(1, (os.cpu_count() or 1) // self._limits.workers)
        self._environ = {**environ, **dict.fromkeys(_THREAD_VARIABLES, str(threads))}

    def what_computes(self) -> WorkerReady:
        """Ask a worker which backend and BLAS it has. Takes about 0.6 s; mlx stays out of here.

        Raises:
            StartupError: No worker can start; the message is its own.
        """
        return asyncio.run(self._what_computes())

    def measure(
        self,
        names: Sequence[str],
        *,
        found: Callable[[ArchitectureReport], None],
        progress: RunProgress,
    ) -> None:
        """Probe every name, several at a time.

        Args:
            names: Of architectures, each once.
            found: Told of every row as soon as it is there, in no particular order.
            progress: Told how far it is.

        Raises:
            KeyboardInterrupt: On Ctrl-C, when all workers have been ended.
        """
        asyncio.run(_Sweep(self, names, found, progress).run())

    def process(self, names: Sequence[str]) -> WorkerProcess:
        """A worker for those names, not yet started."""
        return WorkerProcess((*self._command, *names), self._environ)

    @property
    def limits(self) -> RunnerLimits:
        """Limits on parallel work and on its duration."""
        return self._limits

    async def _what_computes(self) -> WorkerReady:
        async with self.process(()) as process:
            try:
                message = await process.message(self._limits.start_s)
            except TimeoutError:
                raise StartupError(
                    f"probing: a worker did not start within {self._limits.start_s:g} s"
                ) from None
            if isinstance(message, WorkerReady):
                return message
            said = shortened(await process.end(self._limits.end_s))
        raise StartupError(f"probing: a worker did not start: {said.rstrip('.')}")


class _Sweep:
    """One run over many names."""

    def __init__(
        self,
        runner: Runner,
        names: Sequence[str],
        found: Callable[[ArchitectureReport], None],
        progress: RunProgress,
    ) -> None:
        size = runner.limits.group
        self._runner = runner
        self._groups = deque(
            deque(names[start : start + size]) for start in range(0, len(names), size)
        )
        self._found = found
        self._progress = progress
        self._running: list[deque[str]] = []

    async def run(self) -> None:
        async with asyncio.TaskGroup() as lanes:
            for _ in range(min(self._runner.limits.workers, len(self._groups))):
                lanes.create_task(self._lane())

    async def _lane(self) -> None:
        while self._groups:
            pending = self._groups.popleft()
            self._running.append(pending)
            while pending:
                await self._one_process(pending)
            # By identity: two groups may both be empty.
            self._running = [one for one in self._running if one is not pending]

    async def _one_process(self, pending: deque[str]) -> None:
        """Run a worker until all is done or it fails; the architecture it failed on is done too."""
        self._show()
        async with self._runner.process(tuple(pending)) as process:
            fault = await self._follow(process, pending)
        if fault and pending:
            self._finish(pending, faulted(pending[0], fault))

    async def _follow(self, process: WorkerProcess, pending: deque[str]) -> str:
        """Take rows until none is missing; what went wrong, or nothing."""
        limits = self._runner.limits
        ready: WorkerReady | None = None
        while pending:
            limit_s = limits.start_s if ready is None else limits.of_architecture_s(ready.backend)
            try:
                message = await process.message(limit_s)
            except TimeoutError:
                return f"it took more than {limit_s:g} s" if ready else "its worker did not start"
            if isinstance(message, WorkerReady):
                ready = message
            elif not isinstance(message, WorkerFinished):
                return await process.end(limits.end_s)
            elif message.report.architecture != pending[0]:
                return f"its worker answered for {message.report.architecture}"
            else:
                self._finish(pending, message.report)
        return ""

    def _finish(self, pending: deque[str], report: ArchitectureReport) -> None:
        pending.popleft()
        self._found(report)
        self._progress.advance()
        self._show()

    def _show(self) -> None:
        self._progress.running(pending[0] for pending in self._running if pending)
