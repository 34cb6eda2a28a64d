"""The rules of ``engine/protocol/blocks.py``, which every engine keeps.

They are proven on the scripted engine and on tiny models, each with and without a state. The tokens
of rows that begin with blocks are checked by ``test_prefix_parity.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from support.engines.block_rows import BlockRows, FilesInMemory, saved_block
from support.engines.constrained_rows import grammar_of
from support.engines.fake_blocks import FakeDisk
from support.engines.fake_engine import FakeEngine, FakeFaults
from support.engines.tiny_engines import loaded
from support.engines.tiny_models import TinyKind

from machd.engine.assembly import make_engine
from machd.engine.protocol.blocks import (
    DropBlocks,
    ForgetSaved,
    LoadBlock,
    ReusedPrefix,
    SaveBlock,
    SavedBlock,
    SplitBlock,
    StoreBlock,
)
from machd.engine.protocol.engine import Engine
from machd.engine.protocol.step import DecodeRow, Lane, PrefillChunk, StepPlan
from machd.request.constraint import ConstraintKind
from machd.request.generation import SamplingParams
from machd_probes.scripts import random_prompt

PROMPT = random_prompt(33, 4)
FULL = len(PROMPT) - 1
PENALISED = SamplingParams(
    temperature=1.0, seed=5, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.5
)


@dataclass
class Maker:
    """A maker of engines of one kind that share a disk tier.

    Attributes:
        lost_loads: Digests of blocks that it has and cannot read.
        dropped_saves: Digests of blocks that it does not write.
    """

    is_fake: bool
    is_stateful: bool
    looks_ahead: bool
    disk: FakeDisk = field(default_factory=dict)
    files: FilesInMemory = field(default_factory=FilesInMemory)
    lost_loads: set[bytes] = field(default_factory=set)
    dropped_saves: set[bytes] = field(default_factory=set)

    def __call__(self, *, has_disk: bool = True) -> BlockRows:
        """Make a fresh engine."""
        return BlockRows(self._engine(has_disk=has_disk))

    def _engine(self, *, has_disk: bool) -> Engine:
        if self.is_fake:
            return FakeEngine(
                is_stateful=self.is_stateful,
                disk=self.disk if has_disk else None,
                faults=FakeFaults(lost_loads=self.lost_loads, dropped_saves=self.dropped_saves),
            )
        kind = TinyKind.HYBRID if self.is_stateful else TinyKind.STANDARD
        self.files.dropped_saves = self.dropped_saves
        files = self.files if has_disk else None
        return make_engine(loaded(kind), looks_ahead=self.looks_ahead, disk_tier=files)

    def lose(self, saved: SavedBlock) -> None:
        """Damage a block in the disk tier."""
        self.lost_loads.add(saved.digest)
        self.files.forget([saved.digest])


_ENGINES: dict[str, Callable[[], Maker]] = {
    "fake": lambda: Maker(is_fake=True, is_stateful=False, looks_ahead=False),
    "fake with state": lambda: Maker(is_fake=True, is_stateful=True, looks_ahead=False),
    "mlx": lambda: Maker(is_fake=False, is_stateful=False, looks_ahead=False),
    "mlx with state": lambda: Maker(is_fake=False, is_stateful=True, looks_ahead=False),
    "ahead": lambda: Maker(is_fake=False, is_stateful=False, looks_ahead=True),
    "ahead with state": lambda: Maker(is_fake=False, is_stateful=True, looks_ahead=True),
}


@pytest.fixture(name="maker", params=list(_ENGINES))
def _maker(request: pytest.FixtureRequest) -> Maker:
    """Every kind of engine."""
    return _ENGINES[request.param]()


@pytest.fixture(name="rows")
def _rows(maker: Maker) -> BlockRows:
    """A fresh engine of every kind."""
    return maker()


def test_unsaved_block_is_reported_once(maker: Maker) -> None:
    """It is reported no later than with the next step; saved again, it is there like any other."""
    rows = maker()
    one, two = rows.prompt_blocks(PROMPT, (8, 16))
    held = {number: rows.store(0, 8 * n, 8 * n + 8) for n, number in enumerate((one, two))}
    first, second = (
        saved_block(held[number], PROMPT[8 * n : 8 * n + 8], 8 * n)
        for n, number in enumerate((one, two))
    )
    maker.dropped_saves.add(second.digest)
    results = [rows.change(SaveBlock(one, first), SaveBlock(two, second))]
    results += [rows.change(DropBlocks(())) for _ in range(3)]

    assert [digest for result in results[:2] for digest in result.unsaved_blocks] == [second.digest]
    assert [result.unsaved_blocks for result in results[2:]] == [(), ()]
    assert rows.change(LoadBlock(901, second)).lost_blocks == (901,)
    maker.dropped_saves.clear()
    results = [rows.change(SaveBlock(two, second)), rows.change(DropBlocks((two,)))]
    assert [result.unsaved_blocks for result in results] == [(), ()]
    assert rows.change(LoadBlock(902, second)).lost_blocks == ()


@pytest.mark.parametrize("has_disk", [True, False])
def test_dropped_block_is_reported_as_unsaved(maker: Maker, *, has_disk: bool) -> None:
    """It is reported as where there is no disk tier."""
    rows = maker(has_disk=has_disk)
    rows.run(StepPlan(prefill=(rows.chunk(PROMPT, 0, 8),)))
    held = rows.store(0, 0, 8)
    saved = saved_block(held, PROMPT[:8], 0)

    drop = DropBlocks((held.block_id,)) if has_disk else DropBlocks(())
    result = rows.change(drop, SaveBlock(held.block_id, saved))

    assert result.unsaved_blocks == (saved.digest,)
    assert rows.change(DropBlocks(())).unsaved_blocks == ()


def test_bytes_of_a_block_follow_its_tokens(rows: BlockRows) -> None:
    """Twice the positions take twice the bytes, and state takes the same at every position."""
    one, two, rest = rows.prompt_blocks(PROMPT, (8, 16, 32))
    del one, two, rest
    sizes = {
        (stop - start): rows.store(0, start, stop).nbytes
        for start, stop in ((0, 8), (0, 16), (8, 32))
    }

    assert sizes[8] > 0
    assert sizes[16] == 2 * sizes[8]
    assert sizes[24] == 3 * sizes[8]


def test_state_costs_bytes_if_the_model_has_one(maker: Maker) -> None:
    """A block of a model without state is reported to miss none."""
    rows = maker()
    rows.run(StepPlan(prefill=(rows.chunk(PROMPT, 0, 16),)))

    without, held = rows.store(0, 0, 16), rows.store(0, 0, 16, has_state=True)

    assert held.has_state
    assert without.has_state is not maker.is_stateful
    assert (held.nbytes > without.nbytes) is maker.is_stateful


def test_kv_in_use_counts_rows_and_not_blocks(rows: BlockRows) -> None:
    """With all rows gone it is 0, however many blocks are held."""
    rows.prompt_blocks(PROMPT, (8, 16))
    assert rows.engine.memory().kv_used_bytes > 0

    rows.release(0)

    assert rows.engine.memory().kv_used_bytes == 0


def test_plan_of_changes_alone_gives_no_tokens(rows: BlockRows) -> None:
    """It gives blocks alone."""
    rows.run(StepPlan(prefill=(rows.chunk(PROMPT, 0, 16),)))

    result = rows.change(StoreBlock(1, 0, 0, 8), StoreBlock(2, 0, 8, 16))

    assert [one.block_id for one in result.held_blocks] == [1, 2]
    assert (result.tokens, result.lost_blocks) == ((), ())


def test_changes_come_before_releases_and_prefill(rows: BlockRows) -> None:
    """A row leaves blocks in the plan that releases its slot to a row that begins with them."""
    rows.run(StepPlan(prefill=(rows.chunk(PROMPT, 0, 16),)))
    opening = rows.chunk(PROMPT, 16, len(PROMPT), block_ids=(1,))

    result = rows.run(
        StepPlan(
            release=(0,),
            prefill=(opening,),
            blocks=(StoreBlock(1, 0, 0, 16, has_state=True),),
        )
    )

    assert [one.block_id for one in result.held_blocks] == [1]
    assert len(result.tokens) == 1


def test_changes_are_made_in_order(rows: BlockRows) -> None:
    """A block can be stored, cut and dropped in one plan; a dropped block is not reported."""
    rows.run(StepPlan(prefill=(rows.chunk(PROMPT, 0, 16),)))

    result = rows.change(
        StoreBlock(1, 0, 0, 16, has_state=True),
        SplitBlock(1, 2, 4),
        DropBlocks((2,)),
        StoreBlock(3, 0, 0, 4),
        DropBlocks((99,)),
    )

    assert {one.block_id for one in result.held_blocks} == {1, 3}
    assert result.lost_blocks == ()
    sizes = {one.block_id: one.nbytes for one in result.held_blocks}
    (whole,) = rows.change(StoreBlock(5, 0, 0, 16, has_state=True)).held_blocks
    assert sizes[1] + sizes[3] == whole.nbytes


def test_block_of_a_free_slot_is_lost(rows: BlockRows) -> None:
    """Blocks to be made of it are lost, too; the rest of the plan is carried out."""
    opening = rows.chunk(PROMPT, 0, len(PROMPT))

    result = rows.run(
        StepPlan(prefill=(opening,), blocks=(StoreBlock(1, 0, 0, 8), SplitBlock(1, 2, 4)))
    )

    assert set(result.lost_blocks) == {1, 2}
    assert result.held_blocks == ()
    assert len(result.tokens) == 1


def test_block_of_a_released_row_is_lost(rows: BlockRows) -> None:
    """Blocks are copied only from rows that hold a slot."""
    rows.run(StepPlan(prefill=(rows.chunk(PROMPT, 0, 16),)))
    rows.release(0)

    assert rows.change(StoreBlock(1, 0, 0, 8)).lost_blocks == (1,)


def test_last_token_of_a_prompt_is_not_stored(rows: BlockRows) -> None:
    """The computed positions of a prompt in chunks can be stored, and no more."""
    rows.run(StepPlan(prefill=(rows.chunk(PROMPT, 0, 16),)))

    assert rows.change(StoreBlock(1, 0, 0, 17)).lost_blocks == (1,)
    assert rows.store(0, 0, 16).block_id


@pytest.mark.parametrize("lane", list(Lane))
def test_last_sampled_token_is_not_stored(rows: BlockRows, lane: Lane) -> None:
    """All positions of a decoding row can be stored but that of the last sampled token."""
    completion = rows.generate(rows.chunk(PROMPT, 0, len(PROMPT), lane=lane), 5)
    computed = len(PROMPT) + len(completion) - 1

    assert rows.change(StoreBlock(901, 0, 0, computed + 1)).lost_blocks == (901,)
    assert rows.store(0, 0, computed).block_id


def test_state_is_stored_only_at_the_last_computed_position(maker: Maker) -> None:
    """A block that ends before it has no state, if the model has one."""
    rows = maker()
    rows.run(StepPlan(prefill=(rows.chunk(PROMPT, 0, 16),)))

    held = rows.store(0, 0, 12, has_state=True)

    assert held.has_state is not maker.is_stateful


def test_split_reports_both_halves(maker: Maker) -> None:
    """Their bytes add up; the tail keeps the number and the state."""
    rows = maker()
    (block,) = rows.prompt_blocks(PROMPT, (16,))
    whole = rows.store(0, 0, 16, has_state=True)

    result = rows.change(SplitBlock(block, 100, 5))

    head, tail = sorted(result.held_blocks, key=lambda one: one.block_id, reverse=True)
    assert (head.block_id, tail.block_id) == (100, block)
    assert head.nbytes + tail.nbytes == whole.nbytes
    assert (head.has_state, tail.has_state) == (not maker.is_stateful, True)
    assert head.nbytes == rows.store(0, 0, 5).nbytes


@pytest.mark.parametrize("sampling", [SamplingParams(temperature=0.0), PENALISED])
@pytest.mark.parametrize("stop", [1, 16, FULL])
def test_reused_tokens_belong_to_the_prompt(
    rows: BlockRows, stop: int, sampling: SamplingParams
) -> None:
    """Penalties, seeds and positions are those of the whole prompt, even if no token is left."""
    expected = rows.alone(PROMPT, 8, sampling)
    blocks = rows.prompt_blocks(PROMPT, (stop,))
    rows.release(0)

    opening = rows.chunk(PROMPT, stop, len(PROMPT), block_ids=blocks, sampling=sampling)
    said = rows.generate(opening, 8)

    assert [one.token_id for one in said] == [one.token_id for one in expected]


def test_row_opened_from_blocks_takes_more_chunks(rows: BlockRows) -> None:
    """Other chunks follow the opening one, as without blocks."""
    expected = rows.alone(PROMPT, 6)
    blocks = rows.prompt_blocks(PROMPT, (8, 16))
    rows.release(0)

    rows.run(StepPlan(prefill=(rows.chunk(PROMPT, 16, 20, block_ids=blocks),)))
    rows.run(StepPlan(prefill=(rows.chunk(PROMPT, 20, 25),)))
    said = rows.generate(rows.chunk(PROMPT, 25, len(PROMPT)), 6)

    assert [one.token_id for one in said] == [one.token_id for one in expected]


def test_block_outlives_its_row_and_a_reset(rows: BlockRows) -> None:
    """It is there until it is dropped."""
    expected = rows.alone(PROMPT, 4)
    blocks = rows.prompt_blocks(PROMPT, (16,))

    rows.engine.reset(max_rows=3)

    said = rows.reusing(PROMPT, 16, blocks, 4)
    assert [one.token_id for one in said] == [one.token_id for one in expected]


def test_row_outlives_its_blocks(rows: BlockRows) -> None:
    """Blocks may be dropped as soon as a row was opened with them."""
    expected = rows.alone(PROMPT, 6)
    blocks = rows.prompt_blocks(PROMPT, (16,))
    rows.release(0)
    rows.run(StepPlan(prefill=(rows.chunk(PROMPT, 16, 20, block_ids=blocks),)))

    rows.drop(*blocks)
    said = rows.generate(rows.chunk(PROMPT, 20, len(PROMPT)), 6)

    assert [one.token_id for one in said] == [one.token_id for one in expected]


def test_row_cannot_be_opened_from_a_dropped_block(rows: BlockRows) -> None:
    """An assertion fails, because it is the scheduler's fault."""
    (block,) = rows.prompt_blocks(PROMPT, (16,))
    rows.release(0)
    rows.drop(block, 77)

    with pytest.raises(AssertionError, match="blocks that are held"):
        rows.run(StepPlan(prefill=(rows.chunk(PROMPT, 16, 20, block_ids=(block,)),)))


def test_number_of_a_dropped_block_can_be_used_again(rows: BlockRows) -> None:
    """A new block may have it."""
    (block,) = rows.prompt_blocks(PROMPT, (16,))

    result = rows.change(DropBlocks((block,)), StoreBlock(block, 0, 0, 8))

    assert [one.block_id for one in result.held_blocks] == [block]


@pytest.mark.parametrize("max_tokens", [4, 8])
def test_last_token_of_a_span_is_not_stored_before_it_is_computed(
    maker: Maker, max_tokens: int
) -> None:
    """All positions of a row with forced tokens can be stored but that of its last token."""
    rows = maker()
    grammar = grammar_of(rows.engine, ConstraintKind.REGEX, "(ab|cd)efghijklmnop[a-z]*")
    sampling = SamplingParams(temperature=0.0, grammar=grammar)
    rows.run(StepPlan(prefill=(rows.chunk(PROMPT, 0, FULL, sampling=sampling),)))
    last = PrefillChunk(
        0, PROMPT[FULL:], FULL, is_last=True, sampling=sampling, reserved_tokens=len(PROMPT) + 30
    )
    counts = [len(rows.run(StepPlan(prefill=(last,))).tokens)]
    while sum(counts) < max_tokens:
        counts.append(len(rows.run(StepPlan(decode=(DecodeRow(0),))).tokens))
    takes_several = maker.is_fake or not maker.is_stateful
    assert (max(counts) > 1) is takes_several
    computed = len(PROMPT) + sum(counts) - 1

    assert rows.change(StoreBlock(901, 0, 0, computed + 1)).lost_blocks == (901,)
    assert rows.store(0, 0, computed).block_id


def _saved(rows: BlockRows, start: int, stop: int) -> SavedBlock:
    """Make a block of the prompt that is in the disk tier and no longer in memory."""
    rows.run(StepPlan(prefill=(rows.chunk(PROMPT, start, stop),)))
    held = rows.store(0, start, stop, has_state=True)
    saved = saved_block(held, PROMPT[start:stop], start)
    rows.change(SaveBlock(held.block_id, saved), DropBlocks((held.block_id,)))
    return saved


def test_another_engine_loads_saved_blocks(maker: Maker) -> None:
    """It finds all blocks at its start, and a row that begins with them gives the same tokens."""
    first = maker()
    expected = first.alone(PROMPT, 6)
    saved = (_saved(first, 0, 8), _saved(first, 8, 16))
    first.engine.close()
    second = maker()

    result = second.change(LoadBlock(7, saved[0]), LoadBlock(8, saved[1]))

    assert second.engine.saved_blocks() == saved
    assert [(one.block_id, one.nbytes, one.has_state) for one in result.held_blocks] == [
        (7 + number, one.nbytes, one.has_state) for number, one in enumerate(saved)
    ]
    said = second.reusing(PROMPT, 16, (7, 8), 6)
    assert [one.token_id for one in said] == [one.token_id for one in expected]
    disk = second.engine.memory().disk
    assert disk is not None
    assert disk.bytes > 0


def test_forgotten_or_unreadable_block_is_lost(maker: Maker) -> None:
    """The other block is loaded."""
    rows = maker()
    saved = (_saved(rows, 0, 8), _saved(rows, 8, 16), _saved(rows, 16, 24))
    rows.change(ForgetSaved((saved[0].digest, b"never there")))
    maker.lose(saved[1])

    result = rows.change(*(LoadBlock(20 + number, one) for number, one in enumerate(saved)))

    assert set(result.lost_blocks) == {20, 21}
    assert [one.block_id for one in result.held_blocks] == [22]
    assert saved[0] not in rows.engine.saved_blocks()


def test_engine_without_a_disk_tier_saves_nothing(maker: Maker) -> None:
    """Saving and forgetting do nothing, and a block to be loaded is lost."""
    rows = maker(has_disk=False)

    saved = _saved(rows, 0, 8)
    result = rows.change(ForgetSaved((saved.digest,)), LoadBlock(1, saved))

    assert result.lost_blocks == (1,)
    assert result.held_blocks == ()
    assert rows.engine.saved_blocks() == ()
    assert rows.engine.memory().disk is None


def test_saving_a_lost_block_does_nothing(maker: Maker) -> None:
    """The block may have been lost in the same plan."""
    rows = maker()
    saved = SavedBlock(b"digest", b"", 0, PROMPT[:8], has_state=False, nbytes=1)

    result = rows.change(StoreBlock(1, 0, 0, 8), SaveBlock(1, saved))

    assert result.lost_blocks == (1,)
    assert rows.engine.saved_blocks() == ()


def test_scripted_engine_checks_the_tokens_of_blocks() -> None:
    """An assertion fails if a row is opened with another text's blocks."""
    rows = BlockRows(FakeEngine())
    blocks = rows.prompt_blocks(PROMPT, (8, 16))
    rows.release(0)
    wrong = (1, *PROMPT[1:])
    assert wrong != PROMPT

    for prompt, ids in ((wrong, blocks), (PROMPT, blocks[::-1]), (PROMPT, blocks[:1])):
        reused = ReusedPrefix(prompt[:16], ids)
        chunk = PrefillChunk(0, prompt[16:], 16, True, SamplingParams(), 64, reused=reused)  # noqa: FBT003
        with pytest.raises(AssertionError):
            rows.run(StepPlan(prefill=(chunk,)))


def test_scripted_engine_checks_the_state_of_blocks() -> None:
    """A row of a model with state begins at the end of a block with state, and nowhere else."""
    rows = BlockRows(FakeEngine(is_stateful=True))
    (block,) = rows.prompt_blocks(PROMPT, (16,))
    head, _ = rows.split(block, 8)
    rows.release(0)

    for length, ids in ((8, (head,)), (12, (head, block))):
        with pytest.raises(AssertionError):
            rows.run(StepPlan(prefill=(rows.chunk(PROMPT, length, 20, block_ids=ids),)))


def test_failed_row_of_the_scripted_engine_leaves_no_blocks() -> None:
    """A row of a model whose logits were NaN leaves none, either."""
    faults = FakeFaults(row_errors={(0, 1): ArithmeticError("no numbers")})
    rows = BlockRows(FakeEngine(faults=faults))
    rows.run(StepPlan(prefill=(rows.chunk(PROMPT, 0, len(PROMPT)),)))
    assert rows.engine.run(StepPlan(decode=(DecodeRow(0),))).faults

    assert rows.change(StoreBlock(1, 0, 0, 8)).lost_blocks == (1,)
