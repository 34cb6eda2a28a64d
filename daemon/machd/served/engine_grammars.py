"""The front's grammar compiler, which has the engine process compile."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress

from machd.link.messages import CompileGrammar
from machd.request.constraint import Constraint
from machd.request.generation import Grammar
from machd.request.intersections import has_unbounded_cost
from machd.request.schema_bounds import check_constraint
from machd.served.open_work import OpenWork

_WANTED_INTERVAL_S = 0.1


class EngineGrammars:
    """Satisfies :class:`machd.engine.protocol.engine.GrammarCompiler`."""

    def __init__(self, work: OpenWork) -> None:
        """Send constraints through ``work`` to the process that serves."""
        self._work = work

    def is_separate(self, constraint: Constraint) -> bool:
        """Return True if compiling a constraint may take seconds; see :class:`machd.engine.protocol.engine.GrammarCompiler`."""
        check_constraint(constraint)
        return has_unbounded_cost(constraint)

    def compile(
        self, constraint: Constraint, *, is_wanted: Callable[[], bool] = lambda: True
    ) -> Grammar:
        """Have the engine process compile a constraint; see :class:`machd.engine.protocol.engine.GrammarCompiler`."""
        asked = self._work.ask(lambda number: CompileGrammar(number, constraint))
        while True:
            with suppress(FutureTimeoutError):
                grammar = asked.result(_WANTED_INTERVAL_S)
                assert isinstance(grammar, Grammar), "the answer to a constraint is a grammar"
                return grammar
            if not is_wanted():
                self._work.drop_constraint(constraint)
