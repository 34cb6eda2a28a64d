"""How far a bench is, on a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class BenchProgress:
    """One bar on standard error that counts requests and bare loops; nothing off a terminal."""

    def __init__(self, console: Console | None = None) -> None:
        """Prepare; entering the context starts drawing."""
        console = console or Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("", total=None)

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

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Away while something else is written to the same terminal."""
        if self._progress.disable:
            yield
            return
        self._progress.stop()
        try:
            yield
        finally:
            self._progress.start()

    def expect(self, count: int) -> None:
        """So many requests and bare loops there will be."""
        self._progress.update(self._task, total=count)

    def say(self, what: str) -> None:
        """What is going on."""
        self._progress.update(self._task, description=what)

    def advance(self) -> None:
        """One more request or bare loop is done."""
        self._progress.advance(self._task)
