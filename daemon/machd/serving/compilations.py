"""Compilations of clients' constraints, beside the event loop.

Equal constraints of several requests are compiled once. A compilation that may take long runs on
other threads than all others, in a process of its own, and ends when no request waits for it any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from functools import partial

from machd.engine.protocol.engine import GrammarCompiler
from machd.request.constraint import Constraint
from machd.request.generation import Grammar
from machd.serving.workers import Workers

_SEPARATE_THREADS = 8
"""Compilations at once that may take long; each has a process."""


class Compilations:
    """Running compilations. Lives on the event loop."""

    def __init__(self) -> None:
        """Start the threads.

        Raises:
            RuntimeError: The system has no room for them.
        """
        self._workers = Workers(1, name="machd-grammar")
        self._separate_workers = Workers(_SEPARATE_THREADS, name="machd-patterns")
        self._running: dict[Constraint, _Compilation] = {}

    async def compile(self, grammars: GrammarCompiler, constraint: Constraint) -> Grammar:
        """Compile a constraint, or wait for the request that does; cancel it to stop waiting.

        Raises:
            GrammarError: It cannot be used.
            OverloadedError: There is no room for its process.
        """
        running = self._running.get(constraint)
        if running is None:
            running = _Compilation(self._compiled(grammars, constraint))
            self._running[constraint] = running
        running.waiting += 1
        try:
            return await asyncio.shield(running.task)
        finally:
            running.waiting -= 1
            if not running.is_wanted:
                running.task.cancel()
                if self._running.get(constraint) is running:
                    del self._running[constraint]

    def close(self) -> None:
        """Let the threads go."""
        self._workers.shutdown()
        self._separate_workers.shutdown()

    async def _compiled(self, grammars: GrammarCompiler, constraint: Constraint) -> Grammar:
        event_loop = asyncio.get_running_loop()
        running = self._running[constraint]
        is_separate = await event_loop.run_in_executor(
            self._workers, grammars.is_separate, constraint
        )
        compile_ = partial(grammars.compile, constraint, is_wanted=lambda: running.is_wanted)
        workers = self._separate_workers if is_separate else self._workers
        return await event_loop.run_in_executor(workers, compile_)


class _Compilation:
    """One compilation and the number of requests that wait for it."""

    def __init__(self, work: Coroutine[object, object, Grammar]) -> None:
        self.task = asyncio.ensure_future(work)
        self.waiting = 0

    @property
    def is_wanted(self) -> bool:
        return self.waiting > 0
