"""A progress bar on a terminal for loading and fetching."""

from __future__ import annotations

from rich.progress import BarColumn, DownloadColumn, SpinnerColumn, Task, TaskID, TextColumn
from rich.text import Text

from machd.bench.progress import TerminalBar


class _KnownBytes(DownloadColumn):
    """Bytes done of all; empty for a stage that is not counted in bytes."""

    def render(self, task: Task) -> Text:
        return Text() if task.total is None else super().render(task)


class ProgressBar(TerminalBar):
    """A bar for each stage."""

    def __init__(self) -> None:
        """Prepare; entering the context starts drawing."""
        super().__init__(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            _KnownBytes(binary_units=True),
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
