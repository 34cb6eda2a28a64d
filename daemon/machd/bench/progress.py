"""A progress bar on standard error, and the one that counts a bench's requests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)


class TerminalBar:
    """A progress bar on standard error; draws nothing where that is no terminal."""

    def __init__(self, *columns: ProgressColumn) -> None:
        """Prepare a bar of these columns and the time; entering the context starts drawing."""
        console = Console(stderr=True)
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


class CountingBar(TerminalBar):
    """One bar that counts things."""

    def __init__(self, description: str = "", *, total: int | None = None) -> None:
        """Count to ``total``, if it is known yet."""
        super().__init__(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        self._task = self._progress.add_task(description, total=total)

    def advance(self, count: int = 1) -> None:
        """Count what was done."""
        self._progress.advance(self._task, count)


class BenchProgress(CountingBar):
    """A bar that counts a bench's requests and runs of the bare loop."""

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

    def expect(self, count: int) -> None:
        """Set the number of requests and runs of the bare loop."""
        self._progress.update(self._task, total=count)

    def say(self, text: str) -> None:
        """Set the text before the bar."""
        self._progress.update(self._task, description=text)
