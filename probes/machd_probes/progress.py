"""Progress of long work: a bar on a terminal, a line now and then in a pipe."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

_LINE_EVERY_S = 15.0


class ProgressLines:
    """A line every quarter of a minute, where standard error is no terminal; short work writes none."""

    def __init__(
        self, console: Console, progress: Callable[[], str], every_s: float = _LINE_EVERY_S
    ) -> None:
        """Prepare; entering the context starts the clock.

        Args:
            console: Where to write; nothing is written if it is a terminal.
            progress: Says how far the work is; called on a thread of its own.
            every_s: Seconds from one line to the next.
        """
        self._console = console
        self._progress = progress
        self._every_s = every_s
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the clock, unless it runs."""
        if self._console.is_terminal or self._thread is not None:
            return
        self._thread = threading.Thread(target=self._write, name="machd-progress", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Write no more; may be called again."""
        self._ended.set()

    def _write(self) -> None:
        elapsed_s = self._every_s
        while not self._ended.wait(self._every_s):
            line = ", ".join(part for part in (self._progress(), f"{elapsed_s:.0f} s") if part)
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)
            elapsed_s += self._every_s


class RunProgress:
    """Architectures that are done, and which run: a bar on standard error, or lines in a pipe."""

    def __init__(self, total: int, console: Console | None = None) -> None:
        """Prepare; entering the context starts drawing.

        Args:
            total: Architectures to measure.
            console: Where to draw; standard error unless given.
        """
        console = console or Console(stderr=True)
        self._progress = Progress(
            TextColumn("probing"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}", markup=False),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("", total=total)
        self._lines = ProgressLines(console, self._line)

    def __enter__(self) -> Self:
        """Start drawing."""
        self._progress.start()
        self._lines.start()
        return self

    def __exit__(
        self,
        _type: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        """Take the bar away."""
        self._progress.stop()
        self._lines.stop()

    def running(self, names: Iterable[str]) -> None:
        """Show the architectures that are being probed."""
        self._progress.update(self._task, description=", ".join(sorted(names)))

    def advance(self) -> None:
        """One more is done."""
        self._progress.advance(self._task)

    def _line(self) -> str:
        task = self._progress.tasks[0]
        return f"probing: {task.completed:.0f} of {task.total:.0f} ({task.description})"
