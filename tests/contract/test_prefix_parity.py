"""A row that begins with blocks gives the tokens that it gives alone, with every cache and company.

Log-probabilities are compared with the same tolerance as in ``test_batch_parity.py``. At the end
faults are planted into blocks, one at least for each kind of cache, and the comparison has to notice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import mlx.core as mx
import pytest
from support.engines.block_rows import ASKED, BlockRows, FilesInMemory, saved_block
from support.engines.parity import differences
from support.engines.tiny_engines import loaded
from support.engines.tiny_models import TinyKind, each_kind, each_kind_and_look_ahead

from machd.engine.assembly import make_engine
from machd.engine.backend.untyped import Cache
from machd.engine.kv.lane_kv import CachedRow
from machd.engine.kv.layers.cache_state import copied
from machd.engine.kv.row_caches import innermost, kv_arrays
from machd.engine.prefix_blocks import arrays as block_arrays
from machd.engine.prefix_blocks import memory_tier
from machd.engine.prefix_blocks.arrays import BlockArrays
from machd.engine.protocol.blocks import LoadBlock, SaveBlock
from machd.engine.protocol.step import DecodeRow, Lane, SampledToken, StepPlan
from machd_probes.scripts import random_prompt

PROMPT = random_prompt(41, 5)
OTHERS = (random_prompt(7, 1), random_prompt(18, 3))
TOKENS = 12
STOPS = (16, 32, 40)
"""Ends of its blocks: two full ones, and the position before its last token."""

_STATEFUL = [kind for kind in TinyKind if kind is not TinyKind.STANDARD]
_KINDS = each_kind()
_AHEAD = pytest.mark.parametrize("looks_ahead", [False, True], ids=["in step", "looking ahead"])


def _rows(kind: TinyKind, *, looks_ahead: bool = False) -> BlockRows:
    return BlockRows(make_engine(loaded(kind), looks_ahead=looks_ahead))


@cache
def _alone(kind: TinyKind, prompt: tuple[int, ...] = PROMPT) -> list[SampledToken]:
    return _rows(kind).alone(prompt, TOKENS)


def _off(one: Sequence[SampledToken], other: Sequence[SampledToken]) -> list[str]:
    return differences(one, other, ASKED)


@each_kind_and_look_ahead()
@pytest.mark.parametrize("lane", list(Lane))
@pytest.mark.parametrize("count", [1, 2, 3])
def test_row_opened_from_blocks_gives_the_same_tokens(
    kind: TinyKind,
    count: int,
    lane: Lane,
    looks_ahead: bool,  # noqa: FBT001
) -> None:
    """It begins with the first blocks, or with all of them, so that nothing is left to prefill."""
    rows = _rows(kind, looks_ahead=looks_ahead)
    blocks = rows.prompt_blocks(PROMPT, STOPS)
    rows.release(0)

    said = rows.reusing(PROMPT, STOPS[count - 1], blocks[:count], TOKENS, lane=lane)

    assert _off(_alone(kind), said) == []


@_AHEAD
@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 39, 40])
def test_positions_can_be_reused_to_the_token(
    length: int,
    looks_ahead: bool,  # noqa: FBT001
) -> None:
    """A standard cache begins with any number of a block's positions."""
    rows = _rows(TinyKind.STANDARD, looks_ahead=looks_ahead)
    blocks = rows.prompt_blocks(PROMPT, STOPS)
    rows.release(0)
    needed = blocks[: sum(length > stop for stop in (0, *STOPS[:-1]))]

    said = rows.reusing(PROMPT, length, needed, TOKENS)

    assert _off(_alone(TinyKind.STANDARD), said) == []


@_KINDS
def test_single_position_can_be_reused(kind: TinyKind) -> None:
    """A block may have one token, and the state at its end."""
    rows = _rows(kind)
    blocks = rows.prompt_blocks(PROMPT, (1,))
    rows.release(0)

    assert _off(_alone(kind), rows.reusing(PROMPT, 1, blocks, TOKENS)) == []


@each_kind_and_look_ahead()
def test_row_opened_from_blocks_joins_others(
    kind: TinyKind,
    looks_ahead: bool,  # noqa: FBT001
) -> None:
    """It gives the tokens that it gives alone, and so do two rows that decode when it comes.

    Its chunk shares a pass with theirs where passes can be mixed.
    """
    rows = _rows(kind, looks_ahead=looks_ahead)
    blocks = rows.prompt_blocks(PROMPT, STOPS[:2])
    rows.release(0)
    said: dict[int, list[SampledToken]] = {0: [], 1: [], 2: []}

    def step(plan: StepPlan) -> None:
        for slot_index, tokens in rows.tokens(plan).items():
            said[slot_index] += tokens

    openings = tuple(
        rows.chunk(prompt, 0, len(prompt), slot) for slot, prompt in enumerate(OTHERS, 1)
    )
    step(StepPlan(prefill=openings))
    both = (DecodeRow(1), DecodeRow(2))
    for _ in range(3):
        step(StepPlan(decode=both))
    opening = rows.chunk(PROMPT, STOPS[1], len(PROMPT) - 3, block_ids=blocks)
    step(StepPlan(prefill=(opening,), decode=both))
    last = rows.chunk(PROMPT, len(PROMPT) - 3, len(PROMPT))
    step(StepPlan(prefill=(last,), decode=both))
    while len(said[0]) < TOKENS:
        step(StepPlan(decode=(DecodeRow(0), *both)))

    assert _off(_alone(kind), said[0][:TOKENS]) == []
    for slot, prompt in enumerate(OTHERS, 1):
        assert _off(_alone(kind, prompt), said[slot][:TOKENS]) == []


@each_kind_and_look_ahead()
@pytest.mark.parametrize("lane", list(Lane))
def test_two_rows_of_the_same_blocks_do_not_disturb_each_other(
    kind: TinyKind,
    lane: Lane,
    looks_ahead: bool,  # noqa: FBT001
) -> None:
    """The blocks stay as they are, and a third row begins with them afterwards."""
    rows = _rows(kind, looks_ahead=looks_ahead)
    blocks = rows.prompt_blocks(PROMPT, STOPS[:2])
    rows.release(0)
    prompts = [PROMPT[: STOPS[1]] + random_prompt(length, 9) for length in (1, 9)]
    openings = tuple(
        rows.chunk(prompt, STOPS[1], len(prompt), slot, block_ids=blocks, lane=lane)
        for slot, prompt in enumerate(prompts)
    )
    said = {slot: list(one) for slot, one in rows.tokens(StepPlan(prefill=openings)).items()}
    while min(len(one) for one in said.values()) < TOKENS:
        for slot, tokens in rows.tokens(StepPlan(decode=(DecodeRow(0), DecodeRow(1)))).items():
            said[slot] += tokens
    rows.release(0, 1)

    for slot, prompt in enumerate(prompts):
        assert _off(_alone(kind, prompt), said[slot][:TOKENS]) == []
    assert _off(_alone(kind), rows.reusing(PROMPT, STOPS[1], blocks, TOKENS)) == []


@each_kind_and_look_ahead()
@pytest.mark.parametrize("lane", list(Lane))
def test_completion_can_be_reused(
    kind: TinyKind,
    lane: Lane,
    looks_ahead: bool,  # noqa: FBT001
) -> None:
    """A row's completion is stored while it decodes beside others, and reused with its prompt.

    Looking ahead, a pass is under way, so that positions can be stored and the state cannot.
    """
    rows = _rows(kind, looks_ahead=looks_ahead)
    others = tuple(
        rows.chunk(prompt, 0, len(prompt), slot) for slot, prompt in enumerate(OTHERS, 1)
    )
    rows.run(StepPlan(prefill=others))
    chunk = rows.chunk(PROMPT, 0, len(PROMPT), lane=lane)
    completion = rows.generate(chunk, 7, others=(1, 2))
    text = (*PROMPT, *(token.token_id for token in completion))
    stop = len(text) - 1
    held = rows.store(0, 0, stop, has_state=True)
    rows.release(1)
    rows.release(0, 2)

    has_positions_alone = kind is TinyKind.STANDARD
    assert held.has_state is (has_positions_alone or not looks_ahead)
    if held.has_state:
        following = (*text, *random_prompt(5, 8))
        said = rows.reusing(following, stop, (held.block_id,), TOKENS)
        assert _off(_alone(kind, following), said) == []


def test_prompts_prefilled_together_leave_blocks() -> None:
    """Three prompts share one padded call, and each leaves a block of its own."""
    rows = _rows(TinyKind.STANDARD)
    prompts = [random_prompt(length, 2) for length in (17, 12, 15)]
    openings = tuple(rows.chunk(one, 0, len(one), slot) for slot, one in enumerate(prompts))
    rows.run(StepPlan(prefill=openings))
    held = [rows.store(slot, 0, len(one) - 1) for slot, one in enumerate(prompts)]
    rows.release(0, 1, 2)

    for prompt, block in zip(prompts, held, strict=True):
        said = rows.reusing(prompt, len(prompt) - 1, (block.block_id,), TOKENS)
        assert _off(_alone(TinyKind.STANDARD, prompt), said) == []


@_KINDS
def test_halves_of_a_block_replace_it(kind: TinyKind) -> None:
    """The parts go together, and the tail still has the state."""
    rows = _rows(kind)
    (block,) = rows.prompt_blocks(PROMPT, (STOPS[1],))
    rows.release(0)

    head, tail = rows.split(block, 5)

    assert _off(_alone(kind), rows.reusing(PROMPT, STOPS[1], (head, tail), TOKENS)) == []


@_KINDS
def test_saved_block_replaces_the_stored_one(kind: TinyKind) -> None:
    """An engine loads the blocks that another one has saved, and a row begins with them."""
    files = FilesInMemory()
    first = BlockRows(make_engine(loaded(kind), disk_tier=files))
    saved = []
    for start, stop in ((0, STOPS[0]), STOPS[:2]):
        first.run(StepPlan(prefill=(first.chunk(PROMPT, start, stop),)))
        held = first.store(0, start, stop, has_state=True)
        saved.append(saved_block(held, PROMPT[start:stop], start))
        first.change(SaveBlock(held.block_id, saved[-1]))
    first.engine.close()

    second = BlockRows(make_engine(loaded(kind), disk_tier=files))
    ids = [second.new_id() for _ in saved]
    result = second.change(*(LoadBlock(*pair) for pair in zip(ids, saved, strict=True)))

    assert [(one.nbytes, one.has_state) for one in result.held_blocks] == [
        (one.nbytes, one.has_state) for one in saved
    ]
    assert result.lost_blocks == ()
    assert _off(_alone(kind), second.reusing(PROMPT, STOPS[1], ids, TOKENS)) == []


Plant = Callable[[pytest.MonkeyPatch], None]


def blocks_in_the_wrong_order(patch: pytest.MonkeyPatch) -> None:
    """Blocks are put together back to front."""
    right = block_arrays.fill_caches

    def fill(caches: Sequence[Cache], blocks: Sequence[BlockArrays], length: int) -> None:
        right(caches, blocks[::-1], length)

    patch.setattr(memory_tier, "fill_caches", fill)


def layers_are_exchanged(patch: pytest.MonkeyPatch) -> None:
    """The first layer with positions gets those of the last one, and so on."""
    patch.setattr(
        block_arrays,
        "_put_together",
        lambda stacks, length: mx.concatenate(list(stacks), axis=2)[::-1, :, :length],
    )


def one_position_is_off(patch: pytest.MonkeyPatch) -> None:
    """A block begins a position late."""
    right = block_arrays.copy_of_row

    def copy(row: CachedRow, start: int, stop: int, *, has_state: bool) -> BlockArrays:
        exact = right(row, start, stop, has_state=has_state)
        late = right(row, start - 1, stop - 1, has_state=False) if start else exact
        return replace(late, state=exact.state)

    patch.setattr(memory_tier, "copy_of_row", copy)


def state_is_that_of_the_block_before(patch: pytest.MonkeyPatch) -> None:
    """A row gets the first block's state, whichever it begins with."""
    right = block_arrays.fill_caches

    def fill(caches: Sequence[Cache], blocks: Sequence[BlockArrays], length: int) -> None:
        right(caches, [*blocks[:-1], replace(blocks[-1], state=blocks[0].state)], length)

    patch.setattr(memory_tier, "fill_caches", fill)


def state_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    """A row begins without state."""
    right = block_arrays.fill_caches

    def fill(caches: Sequence[Cache], blocks: Sequence[BlockArrays], length: int) -> None:
        empty = [copied(one.state) for one in innermost(caches) if kv_arrays(one) is None]
        right(caches, [*blocks[:-1], replace(blocks[-1], state=tuple(empty))], length)

    patch.setattr(memory_tier, "fill_caches", fill)


_FAULTS: list[tuple[Plant, TinyKind]] = [
    *((blocks_in_the_wrong_order, kind) for kind in TinyKind),
    *((layers_are_exchanged, kind) for kind in TinyKind),
    *((state_is_that_of_the_block_before, kind) for kind in _STATEFUL),
    *((state_is_forgotten, kind) for kind in _STATEFUL),
    (one_position_is_off, TinyKind.STANDARD),
    (one_position_is_off, TinyKind.ROTATING),
    (one_position_is_off, TinyKind.NESTED),
]


@pytest.mark.parametrize(
    ("plant", "kind"), _FAULTS, ids=[f"{plant.__name__}-{kind}" for plant, kind in _FAULTS]
)
def test_planted_fault_is_noticed(
    plant: Plant, kind: TinyKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison reports differences as soon as blocks hold something else.

    Where a row may, it takes a part of the second block: attention to all of both, with keys that are
    rotated already, does not depend on their order.
    """
    length = 20 if kind is TinyKind.STANDARD else STOPS[1]
    expected = _alone(kind)
    plant(monkeypatch)
    rows = _rows(kind)
    blocks = rows.prompt_blocks(PROMPT, STOPS[:2])
    rows.release(0)

    assert _off(expected, rows.reusing(PROMPT, length, blocks, TOKENS)) != []


@pytest.mark.parametrize("kind", _STATEFUL)
def test_shared_state_is_noticed(kind: TinyKind, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that is given the block's own state moves it, and the next row begins with the wrong one."""
    monkeypatch.setattr(block_arrays, "copied", lambda state: state)

    with pytest.raises(AssertionError):
        test_two_rows_of_the_same_blocks_do_not_disturb_each_other(
            kind, Lane.SERIAL, looks_ahead=False
        )


def test_neighbours_positions_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison notices blocks that are always copied from a batch's first row."""
    right = block_arrays.copy_of_row

    def copy(row: CachedRow, start: int, stop: int, *, has_state: bool) -> BlockArrays:
        return right(replace(row, index=0), start, stop, has_state=has_state)

    monkeypatch.setattr(memory_tier, "copy_of_row", copy)

    with pytest.raises(AssertionError):
        test_prompts_prefilled_together_leave_blocks()
