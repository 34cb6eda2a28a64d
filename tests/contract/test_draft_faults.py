"""A fault of drafts ends them for one row, which goes on without; other rows keep theirs.

Proposers fail at each of their calls; logits of drafted positions are NaN; samplers fail while drafts
are verified.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import mlx.core as mx
import pytest
from support.engines.constrained_rows import grammar_of
from support.engines.drafted_scripts import DRAFT_TOKENS, Said, constrained_differences, say
from support.engines.oracle import Oracle, WatchedEngine, fail_verification
from support.engines.tiny_engines import alone, loaded
from support.engines.tiny_models import (
    VOCABULARY_TOKENS,
    TinyKind,
    each_kind_and_look_ahead,
    tiny_model,
)
from support.every_run import sampled

from machd.engine.protocol.step import Lane, ProposerKind
from machd.engine.sampling import gumbel_noise
from machd.engine.step.decode_pass import DecodePass
from machd.engine.step.decoder import Decoder
from machd.engine.step.ports import RowProposer
from machd.request.constraint import ConstraintKind
from machd.request.generation import SamplingParams
from machd_probes.play import GREEDY, Join
from machd_probes.scripts import MIXED, random_prompt

TOKENS = 14
_BAD_SEED = 666
_BAD = SamplingParams(temperature=1.0, seed=_BAD_SEED)

_AHEAD = pytest.mark.parametrize("looks_ahead", [False, True], ids=["in step", "looking ahead"])

# Not HYBRID, whose output head is its embedding: a NaN token would make every row's logits NaN.
_POISONABLE = (TinyKind.STANDARD, TinyKind.NESTED, TinyKind.HYBRID_GDN, TinyKind.ROTATING)


class _PlantedError(Exception):
    """A fault of a test's own."""


def _rows() -> list[Join]:
    """The second one is the bad one."""
    rows = [Join(random_prompt(7 + 5 * at, at), TOKENS, MIXED[at]) for at in range(4)]
    rows[1] = Join(rows[1].prompt, TOKENS, _BAD)
    return rows


def _plain(kind: TinyKind, rows: Sequence[Join]) -> Said:
    """Return the tokens of rows that run alone."""
    return Said([alone(kind).tokens(row) for row in rows])


def _oracle(kind: TinyKind, rows: Sequence[Join], right_of_ten: int = 8) -> Oracle:
    said = _plain(kind, rows).token_ids
    answers = {(row.prompt, row.sampling): tokens for row, tokens in zip(rows, said, strict=True)}
    return Oracle(answers, right_of_ten)


class _BadRow:
    """A row's proposer with a planted fault."""

    def __init__(self, right: RowProposer, harm: str, calls: int) -> None:
        self._right = right
        self._harm = harm
        self._calls = calls
        self.is_closed = False

    @property
    def kv_bytes(self) -> int:
        self._fail("kv_bytes")
        return self._right.kv_bytes

    def extend(self, token_ids: Sequence[int]) -> None:
        self._fail("extend")
        self._right.extend(token_ids)

    def propose(self, max_tokens: int) -> tuple[int, ...]:
        self._fail("propose")
        proposed = self._right.propose(max_tokens)
        if self._is_due("too large"):
            return (*proposed[:1], VOCABULARY_TOKENS)
        if self._is_due("far too large"):
            return (*proposed[:1], 1 << 70)
        if self._is_due("negative"):
            return (*proposed[:1], -1)
        if self._is_due("nothing at all"):
            return None  # type: ignore[return-value]
        return proposed

    def close(self) -> None:
        self.is_closed = True
        self._right.close()
        self._fail("close")

    def _fail(self, call: str) -> None:
        if self._is_due(call):
            raise _PlantedError

    def _is_due(self, call: str) -> bool:
        if call != self._harm:
            return False
        self._calls -= 1
        return self._calls < 0


@dataclass
class _BadProposer:
    """An oracle whose proposer for the bad row has a planted fault.

    Attributes:
        harm: Which call fails, or what is wrong with a proposal.
        calls: So many calls go well before.
    """

    oracle: Oracle
    harm: str
    calls: int = 0
    rows: list[_BadRow] = field(default_factory=list)

    @property
    def kind(self) -> ProposerKind:
        return self.oracle.kind

    def open(self, prompt: Sequence[int], params: SamplingParams) -> RowProposer:
        if params.seed != _BAD_SEED:
            return self.oracle.open(prompt, params)
        if self.harm == "open":
            raise _PlantedError
        self.rows.append(_BadRow(self.oracle.open(prompt, params), self.harm, self.calls))
        return self.rows[-1]

    def close(self) -> None:
        self.oracle.close()


_HARMS = [
    ("open", 0),
    *(
        (harm, calls)
        for harm in (
            "extend",
            "propose",
            "too large",
            "far too large",
            "negative",
            "nothing at all",
        )
        for calls in (0, 2)
    ),
]


_HARMED = [
    (harm, calls, lane, looks_ahead)
    for harm, calls in _HARMS
    for lane, looks_ahead in product(Lane, (False, True))
]


@pytest.mark.parametrize(
    ("harm", "calls", "lane", "looks_ahead"),
    # Each harm in both lanes, looking ahead in one of them; of its two times, the other one.
    sampled(
        _HARMED, [one for at, one in enumerate(_HARMED) if at // 4 % 2 == at // 2 % 2 ^ at % 2]
    ),
)
def test_a_proposer_that_fails_ends_the_drafts_of_its_row(
    harm: str,
    calls: int,
    lane: Lane,
    looks_ahead: bool,  # noqa: FBT001
) -> None:
    """The row generates what it generates alone, the fault is reported once, and other rows keep drafting."""
    rows = [Join(row.prompt, row.tokens, row.sampling, lane=lane) for row in _rows()]
    proposer = _BadProposer(_oracle(TinyKind.STANDARD, rows), harm, calls)
    engine = WatchedEngine(loaded(TinyKind.STANDARD), proposer, looks_ahead=looks_ahead)

    said = say(engine, rows, DRAFT_TOKENS)

    assert constrained_differences(_plain(TinyKind.STANDARD, rows), said, rows) == []
    assert said.draft_faults == [1], "told once"
    drafted = {one.slot_index for result in said.results for one in result.drafts}
    assert drafted >= {0, 2, 3}
    assert all(row.is_closed for row in proposer.rows), "and it is let go"
    assert proposer.oracle.open_rows == 0
    assert engine.memory().kv_used_bytes == 0


@each_kind_and_look_ahead()
@pytest.mark.parametrize(
    ("harm", "calls"), sampled([("open", 0), ("extend", 1), ("propose", 2)], [("extend", 1)])
)
def test_a_row_alone_goes_on_without_drafts(
    kind: TinyKind,
    harm: str,
    calls: int,
    looks_ahead: bool,  # noqa: FBT001
) -> None:
    """With any cache; the next row has drafts again."""
    bad, good = _rows()[1], _rows()[2]
    proposer = _BadProposer(_oracle(kind, [bad, good], 10), harm, calls)
    engine = WatchedEngine(loaded(kind), proposer, looks_ahead=looks_ahead)

    said = say(engine, [bad], DRAFT_TOKENS)
    assert constrained_differences(_plain(kind, [bad]), said, [bad]) == []
    assert said.draft_faults == [0]

    said = say(engine, [good], DRAFT_TOKENS)
    assert constrained_differences(_plain(kind, [good]), said, [good]) == []
    assert said.draft_faults == []
    assert said.accepted_tokens > TOKENS / 2


def test_a_proposer_that_proposes_too_many_is_cut_short() -> None:
    """No more is verified than the plan allows, and no more said than the row may have."""
    row = _rows()[1]
    oracle = _oracle(TinyKind.STANDARD, [row], 10)
    engine = WatchedEngine(loaded(TinyKind.STANDARD), oracle)
    with pytest.MonkeyPatch.context() as patch:
        right = type(oracle.open(row.prompt, row.sampling)).propose
        patch.setattr(
            "support.engines.oracle._Row.propose", lambda this, count: right(this, count + 50)
        )
        said = say(engine, [row], DRAFT_TOKENS)

    assert constrained_differences(_plain(TinyKind.STANDARD, [row]), said, [row]) == []
    assert all(
        one.drafted_tokens <= DRAFT_TOKENS for result in said.results for one in result.drafts
    )
    assert engine.said_tokens == TOKENS


def test_a_proposer_that_cannot_say_what_it_holds_is_let_go() -> None:
    """Reading the memory is no fault of the engine's."""
    row = _rows()[1]
    proposer = _BadProposer(_oracle(TinyKind.STANDARD, [row]), "kv_bytes")
    engine = WatchedEngine(loaded(TinyKind.STANDARD), proposer)
    seen: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        right = WatchedEngine.run

        def run(this: WatchedEngine, *args: Any) -> Any:
            result = right(this, *args)
            seen.append(this.memory().kv_used_bytes)
            return result

        patch.setattr(WatchedEngine, "run", run)
        said = say(engine, [row], DRAFT_TOKENS)

    assert constrained_differences(_plain(TinyKind.STANDARD, [row]), said, [row]) == []
    assert said.draft_faults == [0]
    assert seen[0] > seen[-1] == 0


@_AHEAD
@pytest.mark.parametrize("harm", ["close", "hold"])
def test_a_row_that_left_holds_no_proposer(harm: str, looks_ahead: bool) -> None:  # noqa: FBT001
    """A failed closing is not counted either, and nothing refers to the proposer any more."""
    rows = _rows()
    proposer = _BadProposer(_oracle(TinyKind.STANDARD, rows), harm)
    engine = WatchedEngine(loaded(TinyKind.STANDARD), proposer, looks_ahead=looks_ahead)

    said = say(engine, rows, DRAFT_TOKENS)

    assert constrained_differences(_plain(TinyKind.STANDARD, rows), said, rows) == []
    assert said.draft_faults == []
    held = weakref.ref(proposer.rows.pop())
    gc.collect()
    assert held() is None
    assert engine.memory().kv_used_bytes == 0


# --- logits that are NaN ----------------------------------------------------------------------


def _poisoned(kind: TinyKind, token_id: int, proposer: Oracle, *, looks_ahead: bool) -> Any:
    """An engine in which one token id makes keys, values and logits NaN."""
    model = tiny_model(kind)
    embedding: mx.array = model.model.model.embed_tokens.weight
    embedding[token_id] = mx.nan
    return WatchedEngine(model, proposer, looks_ahead=looks_ahead)


def _unsaid(kind: TinyKind, rows: Sequence[Join]) -> int:
    """A token id that is in no row's prompt or answer."""
    known = {token for said in _plain(kind, rows).token_ids for token in said}
    known |= {token for row in rows for token in row.prompt}
    return next(one for one in range(1, VOCABULARY_TOKENS) if one not in known)


_POISONED = list(product(_POISONABLE, (False, True), (False, True)))


@pytest.mark.parametrize(
    ("kind", "together", "looks_ahead"),
    # Each kind alone, looking ahead, and together, in step; plain keys and values in every way.
    sampled(
        _POISONED, [one for one in _POISONED if one[0] is TinyKind.STANDARD or one[1] ^ one[2]]
    ),
)
def test_a_wrong_draft_that_computes_nan_leaves_nothing(
    kind: TinyKind,
    together: bool,  # noqa: FBT001
    looks_ahead: bool,  # noqa: FBT001
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Logits, keys and values of rejected drafts may be NaN; the row goes on as without drafts."""
    rows = _rows()[: 4 if together else 1]
    poison = _unsaid(kind, rows)
    oracle = _oracle(kind, rows, 10)
    right = type(oracle.open(rows[0].prompt, rows[0].sampling)).propose
    oracle.open_rows = 0

    def propose(this: Any, count: int) -> tuple[int, ...]:
        proposed = list(right(this, count))
        proposed[len(this._said) % count :] = [poison] * (count - len(this._said) % count)
        return tuple(proposed)

    monkeypatch.setattr("support.engines.oracle._Row.propose", propose)
    engine = _poisoned(kind, poison, oracle, looks_ahead=looks_ahead)

    said = say(engine, rows, DRAFT_TOKENS)

    assert constrained_differences(_plain(kind, rows), said, rows) == []
    if kind is TinyKind.STANDARD or not together:
        assert 0 <= said.accepted_tokens < engine.drafted_tokens
    assert engine.memory().kv_used_bytes == 0


@_AHEAD
@pytest.mark.parametrize("kind", _POISONABLE)
def test_a_right_draft_that_computes_nan_ends_its_row_alone(
    kind: TinyKind,
    looks_ahead: bool,  # noqa: FBT001
) -> None:
    """The tokens after it mean nothing: a fault, as without drafts; other rows go on."""
    neighbours = [_rows()[0], _rows()[2]]
    poison = _unsaid(kind, neighbours)
    forced = (5, 6, poison, 7, 8, 9)
    bad = Join(
        random_prompt(6, 8), TOKENS, SamplingParams(temperature=0.0, forced_token_ids=forced)
    )
    rows = [neighbours[0], bad, neighbours[1]]
    oracle = _oracle(kind, neighbours, 10)
    oracle.answers = {**oracle.answers, (bad.prompt, bad.sampling): forced}
    engine = _poisoned(kind, poison, oracle, looks_ahead=looks_ahead)

    said = say(engine, rows, DRAFT_TOKENS)

    assert list(said.faults) == [1]
    assert isinstance(said.faults[1], FloatingPointError)
    assert said.token_ids[1] == list(forced[: len(said.token_ids[1])])
    del said.faults[1]
    expected = _plain(kind, [rows[0], rows[2]])
    others = Said([said.tokens[0], said.tokens[2]])
    assert constrained_differences(expected, others, [rows[0], rows[2]]) == []
    assert engine.memory().kv_used_bytes == oracle.open_rows == 0


def test_forced_tokens_survive_a_draft_that_computes_nan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A recomputed pass keeps the tokens that its rows' grammars had forced."""
    plain = WatchedEngine(loaded(TinyKind.STANDARD), None)
    grammar = grammar_of(plain, ConstraintKind.REGEX, "([ab]{2}<-then->){9}")
    rows = [
        Join(random_prompt(9, 1), 40, replace(GREEDY, grammar=grammar)),
        Join(random_prompt(5, 2), 40, MIXED[1]),
    ]
    expected = say(plain, rows)
    known = {one for said in expected.token_ids for one in said}
    known |= {one for row in rows for one in row.prompt}
    poison = next(one for one in range(1, VOCABULARY_TOKENS) if one not in known)
    oracle = Oracle({(rows[1].prompt, rows[1].sampling): expected.token_ids[1]}, 10)
    again: list[list[int]] = []
    right = Decoder.recompute

    def recompute(this: Decoder, current: DecodePass) -> DecodePass:
        again.append([one.forced_tokens for one in current.spans])
        return right(this, current)

    monkeypatch.setattr(Decoder, "recompute", recompute)
    monkeypatch.setattr(
        "support.engines.oracle._Row.propose", lambda this, _count: (poison,) * bool(this._answer)
    )
    engine = _poisoned(TinyKind.STANDARD, poison, oracle, looks_ahead=False)

    said = say(engine, rows, DRAFT_TOKENS)

    assert constrained_differences(expected, said, rows) == []
    assert any(forced[0] for forced in again), "there were forced tokens"


# --- samplers ---------------------------------------------------------------------------------


@_AHEAD
@pytest.mark.parametrize("position", [0, 1, 6, TOKENS - 1])
def test_a_sampler_that_fails_among_drafts_ends_its_row_where_it_would_without(
    position: int,
    looks_ahead: bool,  # noqa: FBT001
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A row keeps all that it says before the draw that fails; its neighbours say what they say alone."""
    rows = _rows()
    oracle = _oracle(TinyKind.STANDARD, rows)
    expected = _plain(TinyKind.STANDARD, rows)
    right = gumbel_noise.draw_key

    def draw(seed: int, at: int) -> tuple[int, int]:
        if seed == _BAD_SEED and at == position:
            raise _PlantedError
        return right(seed, at)

    engine = WatchedEngine(loaded(TinyKind.STANDARD), oracle, looks_ahead=looks_ahead)
    monkeypatch.setattr(gumbel_noise, "draw_key", draw)

    said = say(engine, rows, DRAFT_TOKENS)

    assert {slot: type(cause) for slot, cause in said.faults.items()} == {1: _PlantedError}
    assert said.token_ids[1] == expected.token_ids[1][:position]
    others = [0, 2, 3]
    wrong = constrained_differences(
        Said([expected.tokens[one] for one in others]),
        Said([said.tokens[one] for one in others]),
        [rows[one] for one in others],
    )
    assert wrong == []
    assert engine.memory().kv_used_bytes == oracle.open_rows == 0


def test_a_sampler_that_fails_for_drafts_alone_costs_no_row_a_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A fault in verification alone leaves every row its next token, as without drafts."""
    rows = [*_rows()[:3], Join(random_prompt(4, 4), TOKENS, GREEDY)]
    oracle = _oracle(TinyKind.STANDARD, rows)
    engine = WatchedEngine(loaded(TinyKind.STANDARD), oracle)

    fail_verification(monkeypatch)
    said = say(engine, rows, DRAFT_TOKENS)

    assert constrained_differences(_plain(TinyKind.STANDARD, rows), said, rows) == []
    assert said.accepted_tokens == 0 < engine.drafted_tokens
