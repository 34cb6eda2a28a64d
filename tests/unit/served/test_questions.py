"""Questions to an engine process, which outlive it."""

from __future__ import annotations

import pytest

from machd.errors import OverloadedError
from machd.link.messages import (
    Answered,
    ChangeConfig,
    ClearPrefixes,
    CompileGrammar,
    GrammarCompiled,
)
from machd.request.constraint import Constraint, ConstraintKind
from machd.request.generation import Grammar
from machd.served.questions import Questions, resolve
from machd.settings.model import Settings

_CONSTRAINT = Constraint(ConstraintKind.REGEX, "a+", "regex")


def test_an_unanswered_question_is_asked_again() -> None:
    """In order, and none that has its answer."""
    questions = Questions()
    first, future = questions.ask(lambda number: ClearPrefixes(number, is_disk_included=False))
    second, _ = questions.ask(lambda number: CompileGrammar(number, _CONSTRAINT))
    assert list(questions) == [first, second]

    resolve(questions.take(first.number), Answered(first.number, None, 7))

    assert future.result(0) == 7
    assert list(questions) == [second]


def test_a_grammar_and_an_error_are_answers() -> None:
    """Each resolves the question of its number."""
    questions = Questions()
    one, good = questions.ask(lambda number: CompileGrammar(number, _CONSTRAINT))
    other, bad = questions.ask(lambda number: CompileGrammar(number, _CONSTRAINT))
    grammar = Grammar("start: /a+/", _CONSTRAINT)
    error = OverloadedError("no room")

    resolve(questions.take(other.number), Answered(other.number, error, None))
    resolve(questions.take(one.number), GrammarCompiled(one.number, grammar))

    assert good.result(0) == grammar
    assert bad.exception(0) is error


def test_an_answer_to_a_refused_question_has_no_effect() -> None:
    """The engine answers a change of config although the daemon has refused it meanwhile."""
    questions = Questions()
    change, future = questions.ask(
        lambda number: ChangeConfig(number, Settings(), is_measured=False)
    )
    other, _ = questions.ask(lambda number: ClearPrefixes(number, is_disk_included=True))
    (refused,) = questions.take_all(ChangeConfig)
    error = OverloadedError("it stops")
    refused.set_exception(error)

    resolve(questions.take(change.number), Answered(change.number, None, None))

    assert future.exception(0) is error
    assert list(questions) == [other]


@pytest.mark.parametrize("count", [0, 3])
def test_all_questions_can_be_taken(count: int) -> None:
    """At the end, when none is answered any more."""
    questions = Questions()
    for _ in range(count):
        questions.ask(lambda number: CompileGrammar(number, _CONSTRAINT))

    assert len(questions.take_all()) == count
    assert list(questions) == []
