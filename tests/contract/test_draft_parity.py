"""A row alone generates the same with drafts, right or wrong, in any cache and lane.

An oracle that knows the answers and is wrong at planted places drafts for rows with every way of
choosing tokens. Their answers are compared with those without drafts. Rows of a batch are in
``test_draft_batches.py``, those with grammars in ``test_draft_constrained.py``, and
``test_draft_parity_can_fail.py`` proves that the comparison notices faults.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from support.engines.oracle import Answers, Oracle, WatchedEngine
from support.engines.tiny_engines import alone, loaded
from support.engines.tiny_models import EVERY_RUN, TinyKind, each_kind
from support.every_run import sampled

from machd.engine.protocol.step import Lane
from machd_probes.play import Join, play
from machd_probes.scripts import LENGTHS, MIXED, Script, random_prompt

TOKENS = 16
DRAFT_TOKENS = 4
PROMPTS = [random_prompt(length, number) for number, length in enumerate(LENGTHS)]
ROWS = [Join(prompt, TOKENS, sampling) for prompt, sampling in zip(PROMPTS, MIXED, strict=True)]
RIGHT = (0, 5, 10)

_ENGINES = list(product(TinyKind, Lane, (False, True)))


def _name(kind: TinyKind, lane: Lane, looks_ahead: bool) -> str:  # noqa: FBT001 - of a case
    return f"{kind}-{lane}{'-ahead' * looks_ahead}"


def answers_of(kind: TinyKind, rows: list[Join]) -> Answers:
    """Return the answers of these rows when each runs alone."""
    return {
        (row.prompt, row.sampling): [one.token_id for one in alone(kind).tokens(row)]
        for row in rows
    }


def _passes(*, looks_ahead: bool) -> int:
    """Return the number of passes when every draft is accepted."""
    # The first token comes with the prompt. Looking ahead, the next is under way by then.
    plain = 2 if looks_ahead else 1
    return plain + -(-(TOKENS - plain) // (DRAFT_TOKENS + 1))


@pytest.mark.parametrize(
    ("number", "kind", "lane", "looks_ahead"),
    sampled(
        [(number, *one) for number, one in enumerate(_ENGINES)],
        # Each third of the pairs on each of these kinds.
        [
            _name(*one)
            for number, one in enumerate(_ENGINES)
            if one[0] is TinyKind.STANDARD or (one[0] in EVERY_RUN and number % 4 < 3)
        ],
        [_name(*one) for one in _ENGINES],
    ),
)
def test_a_row_alone_generates_the_same(
    number: int,
    kind: TinyKind,
    lane: Lane,
    looks_ahead: bool,  # noqa: FBT001
) -> None:
    """Tokens and log-probabilities are those without drafts, however many drafts are right.

    Each engine takes a third of the pairs of row and share of right drafts; three consecutive engines
    take all.
    """
    oracle = Oracle(answers_of(kind, ROWS))
    engine = WatchedEngine(loaded(kind), oracle, looks_ahead=looks_ahead)
    for place, row in enumerate(ROWS):
        engine.forget()
        oracle.right_of_ten = RIGHT[(place + number) % len(RIGHT)]
        joins = (replace(row, lane=lane),)
        said = play(engine, joins, drafts=lambda _step, _rows: DRAFT_TOKENS)

        assert alone(kind).differences(Script(joins), said) == []
        assert engine.said_tokens == TOKENS, "none after the last one"
        assert engine.draft_faults == []
        assert engine.drafted_tokens >= TOKENS / 2, "drafts were verified"
        assert engine.passes == TOKENS - engine.accepted_tokens
        if oracle.right_of_ten == 10:
            assert engine.passes == _passes(looks_ahead=looks_ahead)
            assert engine.accepted_tokens == engine.drafted_tokens
        else:
            assert bool(engine.accepted_tokens) == bool(oracle.right_of_ten)
        assert engine.memory().kv_used_bytes == 0
        assert oracle.open_rows == 0
    engine.close()


@each_kind()
@pytest.mark.parametrize("draft_tokens", [1, 12])
def test_any_number_of_drafts_gives_the_same(kind: TinyKind, draft_tokens: int) -> None:
    """One, or more than a window has positions; the last pass stops at the row's last token."""
    row = ROWS[4]
    oracle = Oracle(answers_of(kind, [row]), 8)
    engine = WatchedEngine(loaded(kind), oracle)

    for tokens in (1, 2, 3, 8, 13):
        engine.forget()
        joins = (replace(row, tokens=tokens),)
        said = play(engine, joins, drafts=lambda _step, _rows: draft_tokens)
        assert alone(kind).differences(Script(joins), said) == []
        assert engine.said_tokens == tokens


def test_a_proposer_is_not_asked_where_the_plan_allows_no_drafts() -> None:
    """A proposer gets every generated token, and is asked only when the plan allows drafts."""
    oracle = Oracle(answers_of(TinyKind.STANDARD, ROWS[:1]))
    engine = WatchedEngine(loaded(TinyKind.STANDARD), oracle)

    said = play(engine, ROWS[:1])

    assert alone(TinyKind.STANDARD).differences(Script((ROWS[0],)), said) == []
    assert oracle.asked == engine.drafted_tokens == 0
    assert engine.passes == TOKENS
