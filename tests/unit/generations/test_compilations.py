"""Compilations that requests share, wait for and leave."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine

import pytest
from support.clocks.polling import CEILING_S

from machd.errors import GrammarError
from machd.generations.compilations import _SEPARATE_THREADS, Compilations
from machd.request.constraint import Constraint, ConstraintKind
from machd.request.generation import Grammar

_SLOW = Constraint(ConstraintKind.REGEX, "slow", "p")
_QUICK = Constraint(ConstraintKind.REGEX, "quick", "p")
_BAD = Constraint(ConstraintKind.REGEX, "bad", "p")


class HeldCompiler:
    """Compiles ``slow`` until it is let go, or is not wanted any more."""

    def __init__(self) -> None:
        self.asked: list[Constraint] = []
        self.begun = threading.Event()
        self.may_end = threading.Event()
        self.was_left = threading.Event()

    def is_separate(self, constraint: Constraint) -> bool:
        """The slow ones are."""
        return constraint.source.startswith("slow")

    def compile(
        self, constraint: Constraint, *, is_wanted: Callable[[], bool] = lambda: True
    ) -> Grammar:
        """Nothing is compiled."""
        self.asked.append(constraint)
        if constraint is _BAD:
            raise GrammarError("p: bad", param="p")
        while self.is_separate(constraint) and not self.may_end.is_set():
            self.begun.set()
            if not is_wanted():
                self.was_left.set()
                raise GrammarError("p: left", param="p")
            self.may_end.wait(0.001)
        return Grammar(constraint.source, constraint)


def _compiled(
    compilations: Compilations, compiler: HeldCompiler, constraint: Constraint, client: str = "a"
) -> Coroutine[object, object, Grammar]:
    return compilations.compile(compiler, constraint, client=client, wait_s=CEILING_S)


async def _begun(compiler: HeldCompiler) -> None:
    await asyncio.to_thread(compiler.begun.wait)


async def test_equal_constraints_are_compiled_once_and_others_do_not_wait() -> None:
    """Requests with one schema share its compilation, while another's schema is ready at once."""
    compiler, compilations = HeldCompiler(), Compilations()
    waiting = [asyncio.create_task(_compiled(compilations, compiler, _SLOW)) for _ in range(3)]
    await _begun(compiler)
    assert (await _compiled(compilations, compiler, _QUICK)).source == "quick"
    assert not any(one.done() for one in waiting)
    compiler.may_end.set()
    first, *others = await asyncio.gather(*waiting)
    assert all(one is first for one in others)
    assert compiler.asked == [_SLOW, _QUICK]
    compilations.close()


async def test_compilation_ends_with_the_last_request_that_waits_for_it() -> None:
    """One request that leaves changes nothing for the other; the last one ends the work."""
    compiler, compilations = HeldCompiler(), Compilations()
    one, other = (asyncio.create_task(_compiled(compilations, compiler, _SLOW)) for _ in range(2))
    await _begun(compiler)
    one.cancel()
    await asyncio.wait({one})
    assert not compiler.was_left.is_set()
    other.cancel()
    await asyncio.wait({other})
    await asyncio.to_thread(compiler.was_left.wait)
    # The next request begins anew.
    compiler.may_end.set()
    await _compiled(compilations, compiler, _SLOW)
    assert compiler.asked == [_SLOW, _SLOW]
    compilations.close()


async def test_every_waiting_request_gets_the_error() -> None:
    """A schema that cannot be used is refused to all that sent it."""
    compiler, compilations = HeldCompiler(), Compilations()
    results = await asyncio.gather(
        *(_compiled(compilations, compiler, _BAD) for _ in range(2)), return_exceptions=True
    )
    assert [type(one) for one in results] == [GrammarError, GrammarError]
    with pytest.raises(GrammarError):
        await _compiled(compilations, compiler, _BAD)
    compilations.close()


async def test_a_request_that_asks_again_is_not_told_of_the_error_before() -> None:
    """Although another one that got it has not gone on yet."""
    compiler, compilations = HeldCompiler(), Compilations()

    async def ask_twice() -> None:
        for _ in range(2):
            with pytest.raises(GrammarError):
                await _compiled(compilations, compiler, _BAD)

    await asyncio.gather(ask_twice(), ask_twice())
    assert compiler.asked == [_BAD, _BAD]
    compilations.close()


async def test_clients_take_turns_at_slow_compilations() -> None:
    """A client that queues many delays another by one of them, not by all."""
    compiler, compilations = HeldCompiler(), Compilations()
    many = [Constraint(ConstraintKind.REGEX, f"slow {one}", "p") for one in range(20)]
    waiting = [asyncio.create_task(_compiled(compilations, compiler, one)) for one in many]
    await _begun(compiler)
    other = asyncio.create_task(_compiled(compilations, compiler, _SLOW, "b"))
    await _compiled(compilations, compiler, _QUICK)  # by now the other one waits as well
    compiler.may_end.set()
    await asyncio.gather(other, *waiting)
    order = [one for one in compiler.asked if one is not _QUICK]
    assert order.index(_SLOW) < _SEPARATE_THREADS + 3
    compilations.close()
