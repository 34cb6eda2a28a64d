"""Whoever guesses may fail in every way: the row goes on without, and it is told once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from oracle import EagerPacing

from machd.clock import ManualClock
from machd.engine.protocol.sampling import SamplingParams
from machd.engine.protocol.step import ProposerKind
from machd.engine.speculation.drafting import Drafting
from machd.engine.speculation.proposer import RowProposer

_WIDTH = 100
_PARAMS = SamplingParams()

pytestmark = pytest.mark.usefixtures("eager")


def _one_two_three(count: int) -> tuple[int, ...]:
    return tuple(range(1, count + 1))


@dataclass
class _Row:
    proposes: Callable[[int], tuple[int, ...]] = _one_two_three
    told: list[int] = field(default_factory=list)
    closed: int = 0
    error: Exception | None = None
    kv_bytes: int = 5

    def extend(self, token_ids: Sequence[int]) -> None:
        if self.error is not None:
            raise self.error
        self.told.extend(token_ids)

    def propose(self, max_tokens: int) -> tuple[int, ...]:
        return self.proposes(max_tokens)

    def close(self) -> None:
        self.closed += 1
        if self.error is not None:
            raise self.error


@dataclass
class _Proposer:
    rows: list[_Row]
    kind: ProposerKind = ProposerKind.NGRAM
    closed: int = 0

    def open(self, prompt: Sequence[int], sampling: SamplingParams) -> RowProposer:
        del prompt, sampling
        return self.rows.pop(0)

    def close(self) -> None:
        self.closed += 1


def _drafting(*rows: _Row, kind: ProposerKind = ProposerKind.NGRAM) -> Drafting:
    return Drafting(_Proposer(list(rows), kind), ManualClock(), _WIDTH)


def test_each_row_is_asked_for_what_can_be_used() -> None:
    """No more than its limit, which may be nothing; who proposes too many is cut short."""
    asked: list[int] = []

    def propose(count: int) -> tuple[int, ...]:
        asked.append(count)
        return _one_two_three(count + 4)

    drafting = _drafting(_Row(propose), _Row(), _Row(propose))
    rows = [drafting.open((1,), _PARAMS) for _ in range(3)]

    assert drafting.guess(rows, [3, 0, 1]) == [(1, 2, 3), (), (1,)]
    assert asked == [3, 1]
    assert drafting.guess(rows, [0, 0, 0]) == [(), (), ()]
    assert drafting.worthwhile_tokens(rows, [0, 0, 0]) == [0, 0, 0]


@pytest.mark.parametrize(
    "proposes",
    [
        lambda _count: (3, _WIDTH),
        lambda _count: (3, -1),
        lambda _count: (1 << 40,),
        lambda _count: ("a",),
        lambda _count: None,
        lambda _count: 1 / 0,
    ],
    ids=["too large", "negative", "far too large", "no number", "nothing", "an error"],
)
def test_a_proposal_that_is_none_ends_the_guessing(proposes: Callable[[int], Any]) -> None:
    """Tokens that there are not, things that are no tokens, and errors: told once, closed once."""
    bad, good = _Row(proposes), _Row()
    drafting = _drafting(bad, good)
    rows = [drafting.open((1,), _PARAMS) for _ in range(2)]

    assert drafting.guess(rows, [2, 2]) == [(), (1, 2)]

    assert isinstance(rows[0].take_fault(), Exception)
    assert rows[0].take_fault() is None
    assert rows[1].take_fault() is None
    assert bad.closed == 1
    assert not rows[0].can_propose
    assert rows[0].kv_bytes == 0
    rows[0].extend([1])
    rows[0].close()
    assert bad.told == []
    assert bad.closed == 1
    assert drafting.guess(rows, [2, 2]) == [(), (1, 2)]


def test_what_a_row_has_said_may_fail_too() -> None:
    """And closing then as well: the first cause is told."""
    cause = ValueError("planted")
    bad = _Row()
    row = _drafting(bad).open((1,), _PARAMS)
    row.extend([4, 5])
    assert bad.told == [4, 5]
    bad.error = cause

    row.extend([6])

    assert row.take_fault() is cause
    assert bad.closed == 1


def test_a_row_that_cannot_be_opened_is_not_guessed_for() -> None:
    """It is a row like others, and tells why at once."""
    drafting = _drafting()
    row = drafting.open((1,), _PARAMS)
    assert isinstance(row.take_fault(), IndexError)
    assert drafting.guess([row], [4]) == [()]
    assert not drafting.expects_guess([row])
    row.close()


def test_closing_that_fails_is_nobodys_fault() -> None:
    """The row has left, so there is nobody to tell."""
    bad = _Row(error=ValueError("planted"))
    row = _drafting(bad).open((1,), _PARAMS)
    row.close()
    row.close()
    assert bad.closed == 1
    assert row.take_fault() is None


def test_memory_is_what_open_rows_say() -> None:
    """And nothing once they are closed."""
    row = _drafting(_Row(kv_bytes=7)).open((1,), _PARAMS)
    assert row.kv_bytes == 7
    row.close()
    assert row.kv_bytes == 0


@pytest.mark.parametrize(
    ("kind", "proposes", "expects"),
    [
        (ProposerKind.NGRAM, _one_two_three, True),
        (ProposerKind.NGRAM, lambda _count: (), False),
        (ProposerKind.DRAFT, lambda _count: (), True),
    ],
    ids=["found", "not found", "model"],
)
def test_a_guess_is_expected_where_there_may_be_one(
    kind: ProposerKind,
    proposes: Callable[[int], tuple[int, ...]],
    expects: bool,  # noqa: FBT001
) -> None:
    """Looking up is cheap, so it is asked; a model that guesses always can."""
    drafting = _drafting(_Row(proposes), kind=kind)
    row = drafting.open((1,), _PARAMS)
    assert drafting.expects_guess([row]) is expects


def test_nobody_is_asked_where_guessing_does_not_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the pacing wants is asked for, and no more."""
    monkeypatch.setattr(EagerPacing, "wanted_tokens", lambda _this, rows, _most: [0] * len(rows))
    never = _Row(lambda _count: 1 / 0)  # type: ignore[arg-type, return-value]
    drafting = _drafting(never)
    row = drafting.open((1,), _PARAMS)
    assert drafting.guess([row], [4]) == [()]
    assert not drafting.expects_guess([row])
    assert row.take_fault() is None


def test_what_rows_share_is_closed_once() -> None:
    """By the engine, at its end."""
    proposer = _Proposer([])
    Drafting(proposer, ManualClock(), _WIDTH).close()
    assert proposer.closed == 1
