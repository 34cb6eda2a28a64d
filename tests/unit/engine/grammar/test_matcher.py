"""A row's matcher: thoughts, answer, end, each token told once."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import count

import pytest
from support.engines.constrained_rows import grammar_of, schema_grammar
from support.engines.fake_engine import FakeEngine

from machd.engine.fake.tokenizer import END_OF_TEXT
from machd.engine.grammar.matcher import Matcher, matcher_for
from machd.errors import GrammarError
from machd.request.constraint import ConstraintKind
from machd.request.generation import Grammar, SamplingParams, Thinking

START, END = tuple(b"<think>"), tuple(b"</think>")


@pytest.fixture(name="digits")
def _digits() -> Grammar:
    """Three digits."""
    return grammar_of(FakeEngine(), ConstraintKind.REGEX, "[0-9]{3}")


def matcher(grammar: Grammar | None, thinking: Thinking | None = None) -> Matcher:
    """A matcher that has something to say."""
    made = matcher_for(SamplingParams(grammar=grammar, thinking=thinking))
    assert made is not None
    return made


def say(one: Matcher, text: bytes) -> None:
    """A row says a text of its own choice."""
    for token_id in text:
        one.accept(token_id)


def test_a_row_without_bounds_has_no_matcher() -> None:
    """Rows that may say anything cost nothing, thoughts without a budget included."""
    assert matcher_for(SamplingParams()) is None
    assert matcher_for(SamplingParams(thinking=Thinking(START, END, is_open=True))) is None


def test_matcher_allows_the_tokens_of_the_grammar(digits: Grammar) -> None:
    """Digits, then nothing but the end."""
    one = matcher(digits)
    assert one.allowed() == frozenset(b"0123456789")
    say(one, b"123")
    assert one.allowed() == {END_OF_TEXT}
    one.accept(END_OF_TEXT)


def test_a_token_that_is_not_allowed_is_an_error(digits: Grammar) -> None:
    """A token that a wrong mask let through is an error."""
    one = matcher(digits)
    with pytest.raises(GrammarError):
        one.accept(ord("x"))


def test_tokens_without_a_choice_are_forced() -> None:
    """A constant is forced from its first byte to its last; then the end is allowed."""
    one = matcher(schema_grammar(FakeEngine(), {"const": "hello"}))
    assert bytes(one.take_forced(3)) == b'"he'
    assert not one.needs_mask
    assert bytes(one.take_forced(100)) == b'llo"'
    assert one.allowed() == {END_OF_TEXT}


def test_thoughts_are_free_but_for_their_end_of_text(digits: Grammar) -> None:
    """In open thoughts everything goes except ending the text, since no answer would follow."""
    one = matcher(digits, Thinking(START, END, is_open=True))
    assert one.allowed() == frozenset(range(256))
    say(one, b"any words </thin")
    assert one.allowed() == frozenset(range(256))
    say(one, b"ner...")
    assert not one.is_masked_by_grammar
    say(one, b"</think>")
    assert one.allowed() == frozenset(b"0123456789")


def test_thoughts_may_be_opened_or_left_out(digits: Grammar) -> None:
    """Before anything is said both the answer and thoughts may begin."""
    thinking = Thinking(START, END, is_open=False)
    answers = matcher(digits, thinking)
    assert answers.allowed() == frozenset(b"0123456789<")
    say(answers, b"12")
    assert answers.allowed() == frozenset(b"0123456789")

    thinks = matcher(digits, thinking)
    say(thinks, b"<")
    assert bytes(thinks.take_forced(99)) == b"think>"
    say(thinks, b"hm</think>")
    assert thinks.allowed() == frozenset(b"0123456789")


@pytest.mark.parametrize("budget_tokens", [1, 3])
def test_a_budget_closes_thoughts(digits: Grammar, budget_tokens: int) -> None:
    """After so many tokens the end is forced, and the answer begins."""
    one = matcher(digits, Thinking(START, END, is_open=True, budget_tokens=budget_tokens))
    say(one, b"abc"[:budget_tokens])
    assert bytes(one.take_forced(99)) == b"</think>"
    assert one.allowed() == frozenset(b"0123456789")


def test_a_budget_of_nothing_closes_open_thoughts_at_once(digits: Grammar) -> None:
    """With no tokens to think in, the end comes first of all."""
    one = matcher(digits, Thinking(START, END, is_open=True, budget_tokens=0))
    assert bytes(one.take_forced(99)) == b"</think>"


def test_a_matcher_with_nothing_left_to_say_is_done() -> None:
    """Once thoughts of a plain row are over, it costs what any other row does."""
    one = matcher(None, Thinking(START, END, is_open=True, budget_tokens=9))
    before = one.is_done
    say(one, b"a</think>")
    assert [before, one.is_done] == [False, True]
    short = matcher(None, Thinking(START, END, is_open=True, budget_tokens=1))
    say(short, b"a")
    assert [short.is_done, len(short.take_forced(99)), short.is_done] == [False, len(END), True]


def test_rows_of_one_grammar_do_not_share_their_place(digits: Grammar) -> None:
    """Each row has a matcher of its own."""
    one, other = matcher(digits), matcher(digits)
    say(one, b"12")
    assert other.allowed() == frozenset(b"0123456789")
    say(other, b"9")
    say(one, b"3")
    assert one.allowed() == {END_OF_TEXT}


@pytest.mark.parametrize(
    ("slow_s", "every", "is_refused"),
    [(0.03, 1, True), (0.03, 2, True), (5.0, 200, False), (0.03, 20, False)],
    ids=["each step", "each other step", "rare pauses", "slow now and then"],
)
def test_a_grammar_that_holds_up_the_batch_is_given_up_and_pauses_are_forgiven(
    slow_s: float,
    every: int,
    is_refused: bool,  # noqa: FBT001
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A machine that stands still now and then ends no answer, however long; slow steps in a row do."""
    readings = count()
    now_s = 0.0

    def cpu_s() -> float:
        nonlocal now_s
        number = next(readings)
        if number % 2 == 1 and number // 2 % every == 0:  # a step reads the clock before and behind
            now_s += slow_s
        return now_s

    monkeypatch.setattr("machd.engine.grammar.matcher.thread_cpu_s", cpu_s)
    one = matcher(grammar_of(FakeEngine(), ConstraintKind.REGEX, "[0-9]*"))
    with pytest.raises(GrammarError, match="too complex") if is_refused else nullcontext():
        say(one, b"7" * 4000)
