"""Progress of a sweep over architectures, on a terminal."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class RunProgress:
    """One bar on standard error: architectures done, and which run; nothing off a terminal."""

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
        self._progress.stop()

    def running(self, names: Iterable[str]) -> None:
        """Show the architectures that are being probed."""
        self._progress.update(self._task, description=", ".join(sorted(names)))

    def advance(self) -> None:
        """One more is done."""
        self._progress.advance(self._task)
