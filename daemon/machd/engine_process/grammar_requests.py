"""Compilations of constraints for the front, on threads beside the engine thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import structlog

from machd.engine.protocol.engine import GrammarCompiler
from machd.errors import EngineFaultError, MachdError
from machd.link.messages import Answered, CompileGrammar, GrammarCompiled

_THREADS = 5
"""Most compilations at once: one quick one, and four that may take long."""


class GrammarRequests:
    """Running and waiting compilations, by the question's number."""

    def __init__(self, answer: Callable[[Answered | GrammarCompiled], None]) -> None:
        """Begin with none; ``answer`` is called on threads of their own."""
        self._answer = answer
        self._threads = ThreadPoolExecutor(_THREADS, "machd-grammar")
        self._dropped: dict[int, threading.Event] = {}

    def compile(self, grammars: GrammarCompiler, asked: CompileGrammar) -> None:
        """Begin to compile a constraint."""
        self._dropped[asked.number] = threading.Event()
        self._threads.submit(self._compile, grammars, asked)

    def drop(self, number: int) -> None:
        """Cancel a compilation that no request waits for; no effect once it is done."""
        if (dropped := self._dropped.get(number)) is not None:
            dropped.set()

    def _compile(self, grammars: GrammarCompiler, asked: CompileGrammar) -> None:
        number, dropped = asked.number, self._dropped[asked.number]
        try:
            grammar = grammars.compile(asked.constraint, is_wanted=lambda: not dropped.is_set())
        except MachdError as error:
            self._answer(Answered(number, error, None))
        except BaseException as error:  # noqa: BLE001 - whatever it is, the request must get an answer
            structlog.get_logger("machd.engine").exception("grammar.not_compiled")
            fault = EngineFaultError(f"{type(error).__name__}; the log says more")
            self._answer(Answered(number, fault, None))
        else:
            self._answer(GrammarCompiled(number, grammar))
        finally:
            del self._dropped[number]
