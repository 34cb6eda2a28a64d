"""Progress on standard error, for loading and fetching, and for counting: bars, or lines in a pipe."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from machd_probes.progress import ProgressLines


class TerminalBar:
    """A progress bar on standard error; where that is no terminal, a line now and then."""

    def __init__(self, *columns: ProgressColumn, has_lines: bool = True) -> None:
        """Prepare a bar of these columns and the time; entering the context starts drawing.

        With ``has_lines`` lines stand in for the bar where there is no terminal.
        """
        console = Console(stderr=True)
        self._lines = ProgressLines(console, self._line) if has_lines else None
        self._progress = Progress(
            *columns,
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )

    def __enter__(self) -> Self:
        """Start drawing."""
        self._progress.start()
        if self._lines is not None:
            self._lines.start()
        return self

    def __exit__(
        self,
        _type: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        """Take the bar away."""
        self.stop()

    def stop(self) -> None:
        """Take the bar away; may be called again, and from any thread."""
        self._progress.stop()
        if self._lines is not None:
            self._lines.stop()

    def _line(self) -> str:
        """The text of the last task, and how much of it is done."""
        task = next(iter(self._progress.tasks[-1:]), None)
        if task is None:
            return ""
        done = "" if task.total is None else self._done(task.completed, task.total)
        return ": ".join(part for part in (task.description, done) if part)

    def _done(self, completed: float, total: float) -> str:
        return f"{completed:.0f} of {total:.0f}"


class CountingBar(TerminalBar):
    """One bar that counts things."""

    def __init__(
        self,
        description: str = "",
        *,
        total: int | None = None,
        columns: Iterable[ProgressColumn] = (),
    ) -> None:
        """Count to ``total``, if it is known yet; ``columns`` come behind the count."""
        super().__init__(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), *columns
        )
        self._task = self._progress.add_task(description, total=total)

    def advance(self, count: int = 1) -> None:
        """Count what was done."""
        self._progress.advance(self._task, count)

    def say(self, text: str) -> None:
        """Set the text before the bar."""
        self._progress.update(self._task, description=text)

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Hide the bar while something else is written to the same terminal."""
        if self._progress.disable:
            yield
            return
        self._progress.stop()
        try:
            yield
        finally:
            self._progress.start()


class EstimatingBar(CountingBar):
    """One bar that counts things, with the time that the rest will take at the speed so far."""

    def __init__(self, *, total: int) -> None:
        super().__init__(total=total, columns=[TextColumn("left:"), TimeRemainingColumn()])


class _KnownBytes(DownloadColumn):
    """Bytes done of all; empty for a stage that is not counted in bytes."""

    def render(self, task: Task) -> Text:
        return Text() if task.total is None else super().render(task)


class ProgressBar(TerminalBar):
    """A bar for each stage."""

    def __init__(self, *, has_lines: bool = True) -> None:
        """Prepare; without ``has_lines`` no lines stand in for the bar where a daemon has its log."""
        super().__init__(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            _KnownBytes(binary_units=True),
            has_lines=has_lines,
        )
        self._task: TaskID | None = None

    def stage(self, name: str, total_bytes: int | None) -> None:
        """Begin the next bar."""
        if self._task is not None:
            self._progress.remove_task(self._task)
        self._task = self._progress.add_task(name, total=total_bytes)

    def advance(self, done_bytes: int) -> None:
        """Move the bar on."""
        if self._task is not None:
            self._progress.advance(self._task, done_bytes)

    def _done(self, completed: float, total: float) -> str:
        return f"{completed / 1e6:.0f} of {total / 1e6:.0f} MB"
