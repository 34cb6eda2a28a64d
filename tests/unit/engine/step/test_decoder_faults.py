"""A row's fault affects no other row, and a failed step leaves no rows in the engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import product
from typing import Any

import mlx.core as mx
import pytest
from support.engines.parity import differences
from support.engines.tiny_engines import alone, loaded
from support.engines.tiny_models import VOCABULARY_TOKENS, TinyKind, tiny_model
from support.every_run import sampled

from machd.engine.assembly import make_engine
from machd.engine.kv.batch_lane import BatchLaneKv
from machd.engine.kv.layers import slab
from machd.engine.kv.layers.slab import SlabKv
from machd.engine.protocol.engine import Engine
from machd.engine.protocol.step import DecodeRow, PrefillChunk, RowFault, SampledToken, StepPlan
from machd.engine.sampling import gumbel_noise
from machd.engine.sampling.sampling_state import SamplingState
from machd.engine.step.decoder import Decoder
from machd.engine.step.mlx_engine import MlxEngine
from machd.request.generation import SamplingParams
from machd_probes.play import Join
from machd_probes.scripts import MIXED, random_prompt

_TOKENS = 8
_BAD_SEED = 666
_BAD = SamplingParams(temperature=1.0, seed=_BAD_SEED)

_LOOKS_AHEAD = pytest.mark.parametrize("looks_ahead", [False, True], ids=["reads", "looks ahead"])

# Not HYBRID, whose head is its embedding: a token that is no number would be one for everybody.
_POISONABLE = (TinyKind.STANDARD, TinyKind.NESTED, TinyKind.HYBRID_GDN, TinyKind.ROTATING)


class _PlantedError(BaseException):
    """A fault of a test's own; like a panic of a library written in Rust, it is no Exception."""


class _Batch:
    """Rows stepped by hand. A row is named by its slot, which no other row gets in a test."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._running: dict[int, Join] = {}
        self._released: list[int] = []
        self.tokens: dict[int, list[SampledToken]] = {}
        self.faults: dict[int, RowFault] = {}

    def step(
        self,
        *,
        joins: dict[int, Join] | None = None,
        leaves: Sequence[int] = (),
        decodes: bool = True,
    ) -> None:
        """Let rows go, compute the whole prompts of others, and decode all that ran before."""
        joins = joins or {}
        for slot_index in leaves:
            self._release(slot_index)
        plan = StepPlan(
            tuple(self._released),
            tuple(_whole(slot_index, join) for slot_index, join in joins.items()),
            tuple(DecodeRow(slot_index) for slot_index in self._running if decodes),
        )
        self._running |= joins
        self._released = []
        self.tokens |= {slot_index: [] for slot_index in joins}
        result = self._engine.run(plan)
        for token in result.tokens:
            self.tokens[token.slot_index].append(token)
            if len(self.tokens[token.slot_index]) == self._running[token.slot_index].tokens:
                self._release(token.slot_index)
        for fault in result.faults:
            assert fault.slot_index not in self.faults, "a row fails once"
            self.faults[fault.slot_index] = fault
            self._release(fault.slot_index)

    def run_to_end(self) -> None:
        """Step until every row has ended and is freed."""
        while self._running or self._released:
            self.step()

    def _release(self, slot_index: int) -> None:
        del self._running[slot_index]
        self._released.append(slot_index)


def _whole(slot_index: int, join: Join) -> PrefillChunk:
    return PrefillChunk(
        slot_index,
        join.prompt,
        start=0,
        is_last=True,
        sampling=join.sampling,
        reserved_tokens=len(join.prompt) + join.tokens,
        lane=join.lane,
    )


def _wrong(kind: TinyKind, join: Join, tokens: list[SampledToken]) -> list[str]:
    """Return where a row said something else than alone."""
    return differences(alone(kind).tokens(join), tokens, join.sampling)


def _rows(count: int, *, tokens: int = _TOKENS) -> list[Join]:
    """Rows of different prompts and parameters."""
    return [
        Join(random_prompt(9 + 4 * number, number), tokens, MIXED[number])
        for number in range(count)
    ]


# --- samplers ---------------------------------------------------------------------------------


def _draw_fails_at(patch: pytest.MonkeyPatch, position: int) -> None:
    """Make the draw of the rows with the bad seed fail at a position."""
    right = gumbel_noise.draw_key

    def draw(seed: int, at: int) -> tuple[int, int]:
        if seed == _BAD_SEED and at == position:
            raise _PlantedError
        return right(seed, at)

    patch.setattr(gumbel_noise, "draw_key", draw)


_POSITIONS = (0, 1, 5, _TOKENS - 1)
_BAD_ROWS = ((0,), (1,), (3,), (0, 3), (0, 1, 2, 3))


@_LOOKS_AHEAD
@pytest.mark.parametrize(
    ("position", "bad"),
    # Each position for the first row, each set of rows at a position in between.
    sampled(
        product(_POSITIONS, _BAD_ROWS),
        [*product(_POSITIONS, _BAD_ROWS[:1]), *product((5,), _BAD_ROWS)],
    ),
)
def test_a_sampler_that_fails_ends_its_row_alone(
    bad: tuple[int, ...],
    position: int,
    looks_ahead: bool,  # noqa: FBT001
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows whose draw fails keep their tokens and fail; all others generate what they do alone."""
    _draw_fails_at(monkeypatch, position)
    engine = make_engine(loaded(TinyKind.STANDARD), looks_ahead=looks_ahead)
    batch = _Batch(engine)
    joins = {
        slot_index: Join(join.prompt, join.tokens, _BAD) if slot_index in bad else join
        for slot_index, join in enumerate(_rows(4))
    }

    batch.step(joins=joins)
    batch.run_to_end()

    assert sorted(batch.faults) == list(bad)
    assert all(isinstance(fault.cause, _PlantedError) for fault in batch.faults.values())
    for slot_index, join in joins.items():
        if slot_index in bad:
            assert len(batch.tokens[slot_index]) == position
        else:
            assert _wrong(TinyKind.STANDARD, join, batch.tokens[slot_index]) == []
    assert engine.memory().kv_used_bytes == 0


@_LOOKS_AHEAD
def test_the_first_sampling_state_that_fails_ends_its_row_alone(
    looks_ahead: bool,  # noqa: FBT001
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A row whose state cannot be made never joins; those beside it say what they say alone."""
    right = SamplingState.for_prompt.__func__  # type: ignore[attr-defined]

    def for_prompt(cls: type[SamplingState], params: SamplingParams, *rest: Any) -> SamplingState:
        if params.seed == _BAD_SEED:
            raise _PlantedError
        state: SamplingState = right(cls, params, *rest)
        return state

    monkeypatch.setattr(SamplingState, "for_prompt", classmethod(for_prompt))
    engine = make_engine(loaded(TinyKind.STANDARD), looks_ahead=looks_ahead)
    batch = _Batch(engine)
    good = _rows(3)
    bad = Join(random_prompt(6, 99), _TOKENS, _BAD)

    batch.step(joins={0: good[0], 1: bad, 2: good[1]})
    batch.step(joins={3: bad})
    batch.step(joins={4: good[2]})
    batch.run_to_end()

    assert {slot: type(fault.cause) for slot, fault in batch.faults.items()} == {
        1: _PlantedError,
        3: _PlantedError,
    }
    assert batch.tokens[1] == batch.tokens[3] == []
    for slot_index, join in zip((0, 2, 4), good, strict=True):
        assert _wrong(TinyKind.STANDARD, join, batch.tokens[slot_index]) == []
    assert engine.memory().kv_used_bytes == 0


# --- rows of no numbers -----------------------------------------------------------------------

_LONG = Join(random_prompt(60, 1), 24)
_SHORT = Join(random_prompt(5, 2), _TOKENS)
_MIDDLE = Join(random_prompt(20, 3), _TOKENS)


@cache
def _poison(kind: TinyKind) -> int:
    """Return a token id that no row of these tests has, and make its embedding NaN."""
    said = {
        token.token_id for join in (_LONG, _SHORT, _MIDDLE) for token in alone(kind).tokens(join)
    }
    read = {*_LONG.prompt, *_SHORT.prompt, *_MIDDLE.prompt}
    return next(one for one in range(1, VOCABULARY_TOKENS) if one not in said | read)


def _poisoned_engine(kind: TinyKind, *, looks_ahead: bool) -> MlxEngine:
    """An engine of which one token makes keys, values and logits that are not numbers."""
    model = tiny_model(kind)
    embedding: mx.array = model.model.model.embed_tokens.weight
    embedding[_poison(kind)] = mx.nan
    return make_engine(model, looks_ahead=looks_ahead)


def _bad(kind: TinyKind, *, tokens: int = _TOKENS) -> Join:
    """Return a row of forty tokens, of which the second half computes NaN."""
    return Join((*random_prompt(20, 7), *[_poison(kind)] * 20), tokens)


@pytest.mark.parametrize(
    ("kind", "looks_ahead"),
    sampled(
        product(_POISONABLE, (False, True)),
        [*product(_POISONABLE, (False,)), (TinyKind.STANDARD, True)],
    ),
)
def test_a_row_of_no_numbers_fails_alone(kind: TinyKind, looks_ahead: bool) -> None:  # noqa: FBT001
    """Its logits mean nothing, so it gets no token but a fault; its neighbours notice nothing."""
    engine = _poisoned_engine(kind, looks_ahead=looks_ahead)
    batch = _Batch(engine)

    batch.step(joins={0: _SHORT, 1: _bad(kind), 2: _LONG})
    batch.step(joins={3: _bad(kind), 4: _MIDDLE})
    batch.run_to_end()

    assert sorted(batch.faults) == [1, 3]
    assert all(isinstance(fault.cause, FloatingPointError) for fault in batch.faults.values())
    assert batch.tokens[1] == batch.tokens[3] == []
    for slot_index, join in ((0, _SHORT), (2, _LONG), (4, _MIDDLE)):
        assert _wrong(kind, join, batch.tokens[slot_index]) == []
    assert engine.memory().kv_used_bytes == 0


def _its_fault_is_read(batch: _Batch, bad: Join) -> None:
    """Nothing but the fault ends it."""
    batch.step(joins={1: bad})
    while 1 not in batch.faults:
        batch.step()


def _before_its_first_step(batch: _Batch, bad: Join) -> None:
    """It leaves when its prompt is computed and it was not decoded."""
    batch.step(joins={1: bad}, decodes=False)
    batch.step(leaves=[1], decodes=False)


def _while_a_step_is_under_way(batch: _Batch, bad: Join) -> None:
    """The row leaves while a dispatched step with it is unread."""
    batch.step(joins={1: bad})
    if not batch.faults:
        batch.step()
    if not batch.faults:
        batch.step(leaves=[1])


_Ending = Callable[[_Batch, Join], None]
_ENDINGS: tuple[_Ending, ...] = (
    _its_fault_is_read,
    _before_its_first_step,
    _while_a_step_is_under_way,
)


_LEFT_BEHIND = list(product((TinyKind.STANDARD, TinyKind.NESTED), _ENDINGS, (1, 2, _TOKENS)))


@_LOOKS_AHEAD
@pytest.mark.parametrize(
    ("kind", "ending", "tokens"),
    # Each ending on both kinds; each length of a row on plain keys and values.
    sampled(
        _LEFT_BEHIND, [one for one in _LEFT_BEHIND if TinyKind.STANDARD in one or _TOKENS in one]
    ),
)
def test_a_nan_that_a_row_leaves_behind_reaches_no_other_row(
    kind: TinyKind,
    ending: _Ending,
    tokens: int,
    looks_ahead: bool,  # noqa: FBT001
) -> None:
    """A row that takes its place in the slab, by joining or moving, generates what it does alone."""
    engine = _poisoned_engine(kind, looks_ahead=looks_ahead)
    batch = _Batch(engine)
    batch.step(joins={0: _LONG})

    ending(batch, _bad(kind, tokens=tokens))
    batch.step(joins={2: _SHORT})
    batch.step(joins={3: _MIDDLE})
    batch.run_to_end()

    assert not batch.faults.keys() - {1}
    for slot_index, join in ((0, _LONG), (2, _SHORT), (3, _MIDDLE)):
        assert _wrong(kind, join, batch.tokens[slot_index]) == []


@_LOOKS_AHEAD
@pytest.mark.parametrize("tokens", [1, 2, _TOKENS])
def test_who_moves_into_the_gap_of_a_row_of_no_numbers_is_not_harmed(
    tokens: int,
    looks_ahead: bool,  # noqa: FBT001
) -> None:
    """The last row, which fills the gap, is shorter than the one that failed, and goes on right."""
    engine = _poisoned_engine(TinyKind.STANDARD, looks_ahead=looks_ahead)
    batch = _Batch(engine)

    batch.step(joins={0: _LONG, 1: _bad(TinyKind.STANDARD, tokens=tokens), 2: _SHORT})
    batch.run_to_end()

    assert list(batch.faults) == [1]
    for slot_index, join in ((0, _LONG), (2, _SHORT)):
        assert _wrong(TinyKind.STANDARD, join, batch.tokens[slot_index]) == []


@_LOOKS_AHEAD
def test_a_nan_row_that_moves_leaves_no_nan_in_its_old_place(
    looks_ahead: bool,  # noqa: FBT001
) -> None:
    """It moves into a gap before its fault is read; a row that joins at its old place is right."""
    engine = _poisoned_engine(TinyKind.STANDARD, looks_ahead=looks_ahead)
    batch = _Batch(engine)
    ends_first = Join(_MIDDLE.prompt, 1)

    batch.step(joins={0: _LONG, 1: _LONG, 2: ends_first, 3: _bad(TinyKind.STANDARD)})
    batch.step(joins={4: _SHORT, 5: _MIDDLE})
    batch.step(joins={6: _SHORT})
    batch.run_to_end()

    assert list(batch.faults) == [3]
    said = {0: _LONG, 1: _LONG, 2: ends_first, 4: _SHORT, 5: _MIDDLE, 6: _SHORT}
    for slot_index, join in said.items():
        assert _wrong(TinyKind.STANDARD, join, batch.tokens[slot_index]) == []


def test_without_zeros_a_later_row_fails_in_the_place_of_a_nan_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A mask alone does not keep a NaN out, so a place is zeroed when it is taken."""
    take = slab._take
    monkeypatch.setattr(
        slab, "_take", lambda arrays, place, row, **_: take(arrays, place, row, is_blank=True)
    )
    batch = _Batch(_poisoned_engine(TinyKind.STANDARD, looks_ahead=False))
    batch.step(joins={0: _LONG})

    _its_fault_is_read(batch, _bad(TinyKind.STANDARD))
    batch.step(joins={2: _SHORT})
    batch.run_to_end()

    assert sorted(batch.faults) == [1, 2]
    assert _wrong(TinyKind.STANDARD, _LONG, batch.tokens[0]) == []


@_LOOKS_AHEAD
def test_a_prompt_of_one_token_keeps_its_place_when_others_leave_at_once(
    looks_ahead: bool,  # noqa: FBT001
) -> None:
    """Nothing is computed of it before its first step, and a client may be gone by then."""
    batch = _Batch(make_engine(loaded(TinyKind.STANDARD), looks_ahead=looks_ahead))
    single = Join((9,), 8)
    batch.step(joins={0: _LONG, 1: _MIDDLE})
    batch.step()
    batch.step(joins={2: single}, decodes=False)
    batch.step(leaves=[0])
    batch.run_to_end()

    assert not batch.faults
    for slot_index, join in ((1, _MIDDLE), (2, single)):
        assert _wrong(TinyKind.STANDARD, join, batch.tokens[slot_index]) == []


# --- the engine -------------------------------------------------------------------------------


def _fails_once(patch: pytest.MonkeyPatch, owner: type, name: str) -> None:
    """Make the next call of a method fail, and the others work."""
    right = getattr(owner, name)
    calls: list[int] = []

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(len(calls))
        if len(calls) == 1:
            raise _PlantedError
        return right(self, *args, **kwargs)

    patch.setattr(owner, name, method)


_STEPS_THAT_FAIL = (
    (MlxEngine, "_forward"),
    (BatchLaneKv, "begin_pass"),
    (BatchLaneKv, "join"),
    (BatchLaneKv, "select"),
    (SlabKv, "place"),
    (SlabKv, "select"),
    (Decoder, "settle"),
)
_FAILING = [
    (kind, owner, name, looks_ahead)
    for kind in (TinyKind.STANDARD, TinyKind.NESTED_ROTATING)
    for owner, name in _STEPS_THAT_FAIL
    for looks_ahead in (False, True)
]


@pytest.mark.parametrize(
    ("kind", "owner", "name", "looks_ahead"),
    sampled(_FAILING, [one for one in _FAILING if one[0] is TinyKind.STANDARD or not one[3]]),
    ids=lambda one: getattr(one, "__name__", str(one)),
)
def test_after_a_step_that_failed_a_reset_engine_is_as_new(
    kind: TinyKind,
    owner: type,
    name: str,
    looks_ahead: bool,  # noqa: FBT001
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It holds no bytes, and the same rows in the same slots then say what they say alone."""
    made = tiny_model(kind) if owner is MlxEngine else loaded(kind)
    joins = dict(enumerate(_rows(4)))
    late = {4: _SHORT}
    engine = make_engine(made, looks_ahead=looks_ahead)
    batch = _Batch(engine)
    batch.step(joins=joins)
    for _ in range(3):
        batch.step()

    with monkeypatch.context() as patch:
        if owner is MlxEngine:
            _fails_once(patch, type(engine._model.model), "__call__")
        else:
            _fails_once(patch, owner, name)
        with pytest.raises(_PlantedError):
            batch.step(joins=late, leaves=[1])
    engine.reset()
    assert engine.memory().kv_used_bytes == 0

    batch = _Batch(engine)
    batch.step(joins=joins)
    batch.step(joins=late)
    batch.run_to_end()
    assert not batch.faults
    for slot_index, join in (joins | late).items():
        assert _wrong(kind, join, batch.tokens[slot_index]) == []
    assert engine.memory().kv_used_bytes == 0
