"""Properties of every engine that drafts, the scripted one included."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from support.engines.constrained_rows import schema_grammar
from support.engines.fake_engine import FakeEngine, FakeFaults
from support.engines.oracle import Oracle, WatchedEngine
from support.engines.scripted_drafts import drafts_by
from support.engines.tiny_engines import alone, loaded
from support.engines.tiny_models import TinyKind

from machd.engine.protocol.blocks import DropBlocks, StoreBlock
from machd.engine.protocol.engine import Engine
from machd.engine.protocol.step import (
    DecodeRow,
    Lane,
    PrefillChunk,
    ProposerKind,
    SampledToken,
    StepPlan,
    StepResult,
)
from machd.request.generation import SamplingParams
from machd_probes.play import Join
from machd_probes.scripts import MIXED, random_prompt

TOKENS = 22
ROWS = [Join(random_prompt(5 + 4 * at, at), TOKENS, MIXED[at]) for at in range(4)]


@pytest.fixture(
    name="engine", params=["fake", "fake, all right", "fake, all wrong", "mlx", "ahead"]
)
def _engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """Each engine with a proposer and no rows; no row is left behind."""
    engine: Engine
    if request.param.startswith("fake"):
        engine = FakeEngine()
        numbers = {"fake": 7, "fake, all right": 1, "fake, all wrong": 2}
        engine.draft_script = drafts_by(numbers[request.param])
    else:
        kind = TinyKind.STANDARD
        answers = {
            (row.prompt, row.sampling): [one.token_id for one in alone(kind).tokens(row)]
            for row in ROWS
        }
        engine = WatchedEngine(
            loaded(kind), Oracle(answers, 7), looks_ahead=request.param == "ahead"
        )
    yield engine
    engine.reset()
    assert engine.memory().kv_used_bytes == 0


def whole(row: Join, slot_index: int = 0) -> PrefillChunk:
    """A row's prompt."""
    return PrefillChunk(
        slot_index,
        row.prompt,
        start=0,
        is_last=True,
        sampling=row.sampling,
        reserved_tokens=len(row.prompt) + row.tokens,
        lane=row.lane,
    )


def run(
    engine: Engine, rows: dict[int, Join], draft_tokens: int
) -> tuple[dict[int, list[SampledToken]], list[StepResult]]:
    """Run rows that begin together to their ends; return their tokens by slot and the decode steps."""
    said: dict[int, list[SampledToken]] = {slot_index: [] for slot_index in rows}
    chunks = tuple(whole(row, slot_index) for slot_index, row in rows.items())
    results = [engine.run(StepPlan(prefill=chunks))]
    release: tuple[int, ...] = ()
    while True:
        for token in results[-1].tokens:
            said[token.slot_index].append(token)
        running = {one for one in rows if len(said[one]) < rows[one].tokens}
        release = tuple(set(rows) - running)
        if not running:
            break
        decode = tuple(DecodeRow(slot_index, draft_tokens) for slot_index in sorted(running))
        results.append(engine.run(StepPlan(release, (), decode)))
    engine.run(StepPlan(release=release))
    return said, results[1:]


@pytest.mark.parametrize("lane", list(Lane))
@pytest.mark.parametrize("draft_tokens", [1, 4])
def test_drafts_change_when_tokens_come_and_not_which(
    engine: Engine, draft_tokens: int, lane: Lane
) -> None:
    """Alone and together, rows generate the tokens that they generate without drafts, and no more."""
    rows = {slot_index: replace(row, lane=lane) for slot_index, row in enumerate(ROWS)}
    plain, steps = run(engine, rows, 0)
    assert not any(step.drafts for step in steps), "no drafts unless the plan allows them"

    together, fewer = run(engine, rows, draft_tokens)
    assert {at: _ids(tokens) for at, tokens in together.items()} == {
        at: _ids(tokens) for at, tokens in plain.items()
    }
    assert all(len(tokens) == TOKENS for tokens in together.values())
    assert len(fewer) <= len(steps)
    for slot_index, row in rows.items():
        single, _ = run(engine, {0: row}, draft_tokens)
        assert _ids(single[0]) == _ids(plain[slot_index])


def _ids(tokens: list[SampledToken]) -> list[int]:
    return [token.token_id for token in tokens]


def test_outcomes_add_up(engine: Engine) -> None:
    """A row gets its accepted drafts and one token more; a step has at most one outcome a row."""
    rows = dict(enumerate(ROWS))
    _, steps = run(engine, rows, 4)

    drafted = 0
    for step in steps:
        outcomes = {one.slot_index: one for one in step.drafts}
        assert len(outcomes) == len(step.drafts)
        for one in step.drafts:
            assert 0 <= one.accepted_tokens <= one.drafted_tokens <= 4
            assert one.drafted_tokens >= 1
            drafted += 1
        for slot_index in {token.slot_index for token in step.tokens}:
            count = sum(token.slot_index == slot_index for token in step.tokens)
            accepted = outcomes[slot_index].accepted_tokens if slot_index in outcomes else 0
            assert count == 1 + accepted
        assert not step.draft_faults
    assert drafted > 4
    assert engine.model.proposer is ProposerKind.NGRAM


def test_accepted_drafts_are_computed(engine: Engine) -> None:
    """A block may hold all of a row's tokens up to the last step's accepted drafts."""
    row = replace(ROWS[2], lane=Lane.SERIAL)
    said = len(engine.run(StepPlan(prefill=(whole(row),))).tokens)
    stored = 0
    while said < row.tokens:
        result = engine.run(StepPlan(decode=(DecodeRow(0, 4),)))
        accepted = sum(one.accepted_tokens for one in result.drafts)
        computed = len(row.prompt) + said + accepted
        said += len(result.tokens)
        if said < row.tokens:
            stored += 1
            store = StoreBlock(1000 + stored, 0, 0, computed)
            held = engine.run(StepPlan(blocks=(store,)))
            assert [one.block_id for one in held.held_blocks] == [store.block_id], held
    assert stored > 2
    engine.run(StepPlan(release=(0,), blocks=(DropBlocks(tuple(range(1001, 1001 + stored))),)))


def test_a_constrained_row_says_the_same(engine: Engine) -> None:
    """Its grammar holds among drafts, and forced tokens still come in fewer steps."""
    schema = {"enum": ["a long answer that is certain", "another one"]}
    params = SamplingParams(temperature=0.0, grammar=schema_grammar(engine, schema))
    row = Join((5, 6, 7), 12, params)
    plain, _ = run(engine, {0: row}, 0)
    drafted, steps = run(engine, {0: row}, 3)
    assert _ids(drafted[0])[:12] == _ids(plain[0])[:12]
    assert len(steps) < 11


# --- the scripted engine alone ----------------------------------------------------------------


def test_scripted_drafting_fails_where_it_is_to() -> None:
    """From there on the row decodes without drafts, reported once; the slot's next row has drafts again."""
    faults = FakeFaults(draft_errors={(1, 5): ValueError("planted")})
    engine = FakeEngine(faults=faults)
    rows = dict(enumerate(ROWS[:2]))
    plain, _ = run(engine, rows, 0)
    engine.draft_script = lambda position, most: (most, 1 if position == 1 else 0)

    said, steps = run(engine, rows, 2)

    assert said == plain
    told = [one.slot_index for step in steps for one in step.draft_faults]
    assert told == [1]
    drafted = [{one.slot_index for one in step.drafts} for step in steps]
    assert {0, 1} in drafted
    assert {0} in drafted
    faults.draft_errors.clear()
    _, steps = run(engine, {1: ROWS[1]}, 2)
    assert steps[0].drafts


def test_a_scripted_row_that_fails_among_drafts_has_the_tokens_before() -> None:
    """A draft ends before the position that fails, whose fault the next step reports."""
    faults = FakeFaults(row_errors={(0, 4): ValueError("planted")})
    engine = FakeEngine(faults=faults)
    engine.draft_script = drafts_by(1)
    engine.run(StepPlan(prefill=(whole(ROWS[0]),)))

    first = engine.run(StepPlan(decode=(DecodeRow(0, 9),)))
    second = engine.run(StepPlan(decode=(DecodeRow(0, 9),)))

    assert len(first.tokens) == 3
    assert [(one.drafted_tokens, one.accepted_tokens) for one in first.drafts] == [(9, 2)]
    assert not second.tokens
    assert [one.slot_index for one in second.faults] == [0]
    assert not second.drafts
