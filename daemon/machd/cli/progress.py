"""A progress bar on a terminal for loading and fetching."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    SpinnerColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text


class _KnownBytes(DownloadColumn):
    """Bytes done of all, and nothing for a stage that is not counted in bytes."""

    def render(self, task: Task) -> Text:
        return Text() if task.total is None else super().render(task)


class ProgressBar:
    """Draws one bar a stage on standard error; draws nothing where that is no terminal."""

    def __init__(self) -> None:
        """Prepare; entering the context starts drawing."""
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            _KnownBytes(binary_units=True),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            transient=True,
            disable=not Console(stderr=True).is_terminal,
        )
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        """Start drawing."""
        self._progress.start()
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

    def stage(self, name: str, total_bytes: int | None) -> None:
        """Begin the next bar."""
        if self._task is not None:
            self._progress.remove_task(self._task)
        self._task = self._progress.add_task(name, total=total_bytes)

    def advance(self, done_bytes: int) -> None:
        """Move the bar on."""
        if self._task is not None:
            self._progress.advance(self._task, done_bytes)
