"""Questions to an engine process that wait for an answer, each with its number."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import TypeAlias, TypeVar

from msgspec.structs import replace

from machd.engine.protocol.media import PlainArray
from machd.link.messages import (
    Answered,
    ChangeConfig,
    ClearPrefixes,
    CompileGrammar,
    Encode,
    Encoded,
    GrammarCompiled,
)
from machd.request.generation import Grammar

Question: TypeAlias = ChangeConfig | ClearPrefixes | CompileGrammar | Encode
"""A message that has an answer."""

Answer: TypeAlias = Grammar | PlainArray | int | None

_T = TypeVar("_T")


class Questions:
    """Unanswered questions in order. The owner's lock guards them; futures resolve outside of the lock."""

    def __init__(self) -> None:
        self._number = 0
        self._open: dict[int, tuple[Question, Future[Answer]]] = {}

    def __iter__(self) -> Iterator[Question]:
        """Iterate over the messages that a new process has to be sent again."""
        return (question for question, _ in self._open.values())

    def ask(self, make: Callable[[int], Question]) -> tuple[Question, Future[Answer]]:
        """Number a question and add it; its future cannot be cancelled."""
        self._number += 1
        future: Future[Answer] = Future()
        future.set_running_or_notify_cancel()
        self._open[self._number] = make(self._number), future
        return self._open[self._number]

    def take(self, number: int) -> Future[Answer]:
        """Remove a question that is answered and return its future; None if it was refused before."""
        _, future = self._open.pop(number, (None, Future[Answer]()))
        return future

    def suspect(self) -> Future[Answer] | None:
        """Suspect the texts that a process which has ended was given, and return the future of those that are to blame.

        Suspects are computed one after another before all others, so of those that were open at two ends the oldest
        is to blame.
        """
        encoding = [one for one, _ in self._open.values() if isinstance(one, Encode)]
        blamed = next((one for one in encoding if one.is_suspect), None)
        for one in encoding:
            self._open[one.number] = replace(one, is_suspect=True), self._open[one.number][1]
        return None if blamed is None else self.take(blamed.number)

    def take_all(self, kind: type[Question] | None = None) -> list[Future[Answer]]:
        """Remove all questions, or all of one kind, and return their futures."""
        taken = [
            number
            for number, (question, _) in self._open.items()
            if kind is None or isinstance(question, kind)
        ]
        return [self._open.pop(number)[1] for number in taken]


def resolve(future: Future[Answer], answer: Answered | GrammarCompiled | Encoded) -> None:
    """Resolve a future with an answer or an error."""
    match answer:
        case Answered(_, None, value):
            future.set_result(value)
        case Answered(_, error):
            future.set_exception(error)
        case GrammarCompiled(_, value) | Encoded(_, value):
            future.set_result(value)


def read_answer(asked: Future[Answer], read: Callable[[Answer], _T]) -> Future[_T]:
    """Return a future of an answer's value."""
    told: Future[_T] = Future()
    told.set_running_or_notify_cancel()

    def tell(done: Future[Answer]) -> None:
        error = done.exception()
        if error is None:
            told.set_result(read(done.result()))
        else:
            told.set_exception(error)

    asked.add_done_callback(tell)
    return told
