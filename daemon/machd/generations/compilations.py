"""Compilations of clients' constraints, beside the event loop.

Equal constraints of a client's requests are compiled once. A compilation that may take long runs in a
process of its own, on threads reserved for such ones, with clients in rotation; it is killed when no
request waits for it any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from functools import partial
from typing import TypeAlias

from machd.engine.protocol.engine import GrammarCompiler
from machd.generations.turns import Turns
from machd.generations.workers import Workers
from machd.request.constraint import Constraint
from machd.request.generation import Grammar

_SEPARATE_THREADS = 4
"""Compilations at once that may take long; each has a process."""

_Key: TypeAlias = tuple[GrammarCompiler, str, Constraint]
"""A model's compiler, a client, and what it wants compiled."""


class Compilations:
    """Running compilations. Lives on the event loop."""

    def __init__(self) -> None:
        """Start the threads.

        Raises:
            RuntimeError: The system has no room for them.
        """
        self._workers = Workers(1, name="machd-grammar")
        self._separate_workers = Workers(_SEPARATE_THREADS, name="machd-patterns")
        self._turns = Turns(_SEPARATE_THREADS)
        self._running: dict[_Key, _Compilation] = {}

    async def compile(
        self, grammars: GrammarCompiler, constraint: Constraint, *, client: str, wait_s: float
    ) -> Grammar:
        """Compile a constraint, or wait for the request that does; cancel it to stop waiting.

        Args:
            grammars: The model's compiler.
            constraint: The constraint to compile.
            client: Client in whose turn it is compiled.
            wait_s: Longest wait for the grammar.

        Raises:
            GrammarError: The constraint cannot be used.
            ModelSuspendedError: Another model has its turn.
            OverloadedError: There is no room for its process.
            TimeoutError: No grammar came within ``wait_s``.
        """
        key = (grammars, client, constraint)
        running = self._running.get(key)
        if running is None:
            running = _Compilation(self._compiled(key, wait_s))
            self._running[key] = running
        running.waiting += 1
        try:
            async with asyncio.timeout(wait_s):
                return await asyncio.shield(running.task)
        finally:
            running.waiting -= 1
            if not running.is_wanted:
                running.task.cancel()
            is_over = running.task.done() or not running.is_wanted
            if is_over and self._running.get(key) is running:
                del self._running[key]

    def close(self) -> None:
        """Shut the threads down."""
        self._workers.shutdown()
        self._separate_workers.shutdown()

    async def _compiled(self, key: _Key, wait_s: float) -> Grammar:
        event_loop = asyncio.get_running_loop()
        running, (grammars, client, constraint) = self._running[key], key
        is_separate = await event_loop.run_in_executor(
            self._workers, grammars.is_separate, constraint
        )
        compile_ = partial(grammars.compile, constraint, is_wanted=lambda: running.is_wanted)
        if not is_separate:
            return await event_loop.run_in_executor(self._workers, compile_)
        async with self._turns.of(client, wait_s=wait_s):
            return await event_loop.run_in_executor(self._separate_workers, compile_)


class _Compilation:
    """One compilation and the number of requests that wait for it."""

    def __init__(self, work: Coroutine[object, object, Grammar]) -> None:
        self.task = asyncio.ensure_future(work)
        self.waiting = 0

    @property
    def is_wanted(self) -> bool:
        return self.waiting > 0
