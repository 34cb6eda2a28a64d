"""The block pool stays within its limits and evicts the lowest priority first."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from machd.engine.protocol.blocks import (
    BlockChange,
    DropBlocks,
    ForgetSaved,
    HeldBlock,
    LoadBlock,
    SaveBlock,
    SavedBlock,
    SplitBlock,
    StoreBlock,
)
from machd.scheduler.block_pool import BlockPool, RowPosition
from machd.scheduler.block_tree import Block, BlockTree
from machd.scheduler.prefix_limits import BlockCosts, PrefixLimits

ROW = RowPosition(0, None)
PLENTY = 1_000_000


@dataclass
class Shelf:
    """Blocks of one namespace that cost 10 bytes a token, with an engine that does as it is told."""

    max_bytes: int = PLENTY
    max_entries: int | None = None
    disk_bytes: int | None = None
    costs: BlockCosts = field(default_factory=lambda: BlockCosts(10, 0, 0, 0))
    saved: tuple[SavedBlock, ...] = ()
    made: list[BlockChange] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tree = BlockTree(b"model")
        self.kept = BlockPool(self.tree, self.costs, self.limits)
        self.kept.find_saved(self.saved)
        self.root = self.tree.root("")

    @property
    def limits(self) -> PrefixLimits:
        """Limits of the pool."""
        return PrefixLimits(self.max_bytes, self.max_entries, disk_bytes=self.disk_bytes)

    def settle(self, *, lost: tuple[int, ...] = ()) -> list[BlockChange]:
        """Let the engine make what is queued; returns it."""
        changes = list(self.kept.changes)
        self.kept.changes.clear()
        held: dict[int, bool] = {}
        for change in changes:
            match change:
                case StoreBlock():
                    held[change.block_id] = change.has_state
                case LoadBlock():
                    held[change.block_id] = change.saved.has_state
                case _:
                    pass
        known = [
            HeldBlock(one, self.kept._by_id[one].nbytes, has_state)
            for one, has_state in held.items()
            if one in self.kept._by_id and one not in lost
        ]
        self.kept.confirm(known, lost)
        self.kept.check_invariants()
        self.made += changes
        return changes

    def add(self, parent: Block | None, *token_ids: int, row: RowPosition = ROW) -> Block:
        """A block that is in memory."""
        block = self.kept.store(parent or self.root, token_ids, row)
        assert block is not None, "there is room"
        self.settle()
        return block

    def has(self, *blocks: Block) -> list[bool]:
        """Which of them are in memory."""
        return [block.is_held for block in blocks]


def test_what_was_used_last_stays_longest() -> None:
    """The block unused for longest goes first among blocks alike in all else."""
    shelf = Shelf(max_bytes=60)
    first, second, third = (shelf.add(None, number, 0) for number in (1, 2, 3))
    shelf.kept.use([first])
    shelf.add(None, 4, 0)
    assert shelf.has(first, second, third) == [True, False, True]
    shelf.add(None, 5, 0)
    assert shelf.has(first, second, third) == [True, False, False]
    assert shelf.kept.evictions == 2


def test_what_is_used_often_stays_longer_and_not_for_ever() -> None:
    """Ten uses outlive a stream of texts that are used once, for a time."""
    shelf = Shelf(max_bytes=60)
    often = shelf.add(None, 1, 0)
    for _ in range(10):
        shelf.kept.use([often])
    lives = 0
    while often.is_held:
        shelf.add(None, 100 + lives, 0)
        lives += 1
        assert lives < 200, "what was popular once has to go some day"
    assert lives > 10


def test_what_cost_more_to_compute_stays_longer() -> None:
    """A token far behind costs more than one at the beginning."""
    shelf = Shelf(max_bytes=10 * 16_384 + 40)
    long = shelf.kept.store(shelf.root, tuple(range(16_384)), ROW)
    shelf.settle()
    late = shelf.add(long, 7, 7)
    early = shelf.add(None, 99_999, 7)
    shelf.add(None, 99_998, 7)
    assert shelf.has(late, early) == [True, False]


def test_a_beginning_outlives_its_branches() -> None:
    """However often a branch is used, what it begins with is not dropped before it."""
    shelf = Shelf(max_bytes=60)
    beginning = shelf.add(None, 1, 1)
    branches = [shelf.add(beginning, number, 0) for number in (2, 3)]
    shelf.kept.use([branches[0]])
    others = [shelf.add(None, number, 0) for number in (4, 5)]
    assert shelf.has(beginning, *branches, *others)[0], "branches went first"
    assert not all(shelf.has(*branches))


def test_what_running_rows_hold_stays() -> None:
    """And all before it; where nothing else is left there is no room."""
    shelf = Shelf(max_bytes=40)
    first = shelf.add(None, 1, 1)
    second = shelf.add(first, 2, 2)
    shelf.kept.pin(second)
    assert shelf.kept.store(shelf.root, (3,), ROW) is None
    assert shelf.has(first, second) == [True, True]
    shelf.kept.unpin(second)
    shelf.add(None, 3)
    assert shelf.has(first, second) == [True, False]


def test_less_room_is_made_at_once_and_later_for_what_is_held() -> None:
    """A lower limit drops what it can; what is held goes as soon as it is let go."""
    shelf = Shelf()
    blocks = [shelf.add(None, number, 0) for number in range(4)]
    shelf.kept.pin(blocks[0])
    shelf.kept.set_limits(PrefixLimits(0))
    assert shelf.has(*blocks) == [True, False, False, False]
    assert shelf.kept.bytes == 20
    shelf.kept.unpin(blocks[0])
    assert shelf.kept.bytes == 0
    shelf.settle()


def test_memory_pressure_makes_less_room() -> None:
    """While the machine has less than is to be left, blocks give way; later they may come back."""
    shelf = Shelf()
    shelf.kept.set_limits(PrefixLimits(PLENTY, left_bytes=100))
    for number in range(10):
        shelf.add(None, number, 0)
    shelf.kept.observe(50)
    assert shelf.kept.bytes == shelf.kept.limit_bytes - 10 == 140
    shelf.kept.observe(None)
    assert shelf.kept.limit_bytes == PLENTY


def test_entries_are_counted_as_texts() -> None:
    """A chain is one text; each branch is one more; the text that is worth least goes whole."""
    shelf = Shelf(max_entries=2)
    first = shelf.add(None, 1, 1)
    second = shelf.add(first, 2, 2)
    assert shelf.kept.entries == 1
    branch = shelf.add(first, 3, 3)
    assert shelf.kept.entries == 2
    shelf.kept.use([first, branch])
    other = shelf.add(None, 4, 4)
    assert shelf.has(first, second, branch, other) == [True, False, True, True]
    more = shelf.add(None, 5, 5)
    shelf.kept.use([more])
    last = shelf.add(None, 6, 6)
    assert shelf.kept.entries == 2
    assert last.is_held


def test_state_is_added_to_a_block_although_all_entries_are_taken() -> None:
    """A block stored again is no new entry."""
    shelf = Shelf(max_entries=1, costs=BlockCosts(10, 5, 0, 0))
    first = shelf.add(None, 1, 1)
    shelf.kept.pin(first)
    assert shelf.kept.store_anew(first, RowPosition(0, 2))
    shelf.settle()
    assert first.has_state
    assert shelf.kept.bytes == 25


def test_a_split_counts_the_same() -> None:
    """Both halves take what the whole took, until the engine says otherwise."""
    shelf = Shelf(disk_bytes=PLENTY)
    block = shelf.add(None, 1, 2, 3, 4)
    child = shelf.add(block, 5)
    shelf.settle()
    head = shelf.kept.split(block, 1)
    assert (head.nbytes, block.nbytes, shelf.kept.bytes, shelf.kept.entries) == (10, 30, 50, 1)
    shelf.kept.confirm([HeldBlock(head.block_id, 16), HeldBlock(block.block_id, 40)], ())
    assert shelf.kept.bytes == shelf.kept.disk_tier.bytes == 66
    shelf.kept.check_invariants()
    kinds = [type(change) for change in shelf.kept.changes]
    assert kinds == [ForgetSaved, SplitBlock, SaveBlock, SaveBlock]
    assert child.is_saved, "what follows is still found"


def test_what_is_lost_is_not_kept_nor_what_follows() -> None:
    """A store that failed leaves nothing."""
    shelf = Shelf(disk_bytes=PLENTY)
    first = shelf.add(None, 1)
    second = shelf.kept.store(first, (2,), ROW)
    assert second is not None
    third = shelf.kept.store(second, (3,), ROW)
    assert third is not None
    shelf.settle(lost=(second.block_id,))
    assert list(shelf.tree) == [first]
    assert shelf.kept.bytes == 10


def test_a_fault_drops_all_that_may_be_in_memory() -> None:
    """Queued drops and deletions survive an engine fault."""
    shelf = Shelf(max_bytes=30, disk_bytes=30)
    old = [shelf.add(None, number) for number in range(3)]
    new = shelf.kept.store(shelf.root, (9,), ROW)
    assert new is not None
    gone = next(block for block in old if not block.is_held)
    shelf.settle()
    newest = shelf.kept.store(shelf.root, (10,), ROW)
    assert newest is not None
    queued = list(shelf.kept.changes)
    forgotten = [one for one in queued if isinstance(one, ForgetSaved)]
    shelf.kept.disk_tier.set_limit(0)
    shelf.kept.lose_memory()
    shelf.kept.check_invariants()
    dropped = {
        block_id
        for change in shelf.kept.changes
        if isinstance(change, DropBlocks)
        for block_id in change.block_ids
    }
    assert {new.block_id, newest.block_id} <= dropped
    assert {one for one in queued if isinstance(one, DropBlocks)} != set()
    for change in queued:
        if isinstance(change, DropBlocks):
            assert set(change.block_ids) <= dropped
    assert [one for one in shelf.kept.changes if isinstance(one, ForgetSaved)][
        : len(forgotten)
    ] == forgotten
    assert shelf.kept.bytes == shelf.kept.entries == shelf.kept.disk_tier.bytes == 0
    assert not gone.is_held
    assert list(shelf.tree) == []


def _saved(shelf: Shelf) -> tuple[SavedBlock, ...]:
    found = {one.saved.digest: one.saved for one in shelf.made if isinstance(one, SaveBlock)}
    return tuple(sorted(found.values(), key=lambda one: one.start))


def test_what_was_saved_is_found_by_its_tokens() -> None:
    """In another daemon, by the same namespace and no other, and is read before it is used."""
    shelf = Shelf(disk_bytes=PLENTY)
    second = shelf.add(shelf.add(None, 1, 2), 3, 4)
    shelf.settle()
    other = Shelf(disk_bytes=PLENTY, saved=_saved(shelf))
    assert other.kept.disk_tier.count == 2
    assert len(other.kept) == other.kept.bytes == 0
    walk = other.tree.walk(other.root, (1, 2, 3, 4))
    assert (walk.tokens, walk.block.digest) == (4, second.digest)
    assert other.tree.walk(other.tree.root("another"), (1, 2)).tokens == 0
    other.kept.load(walk.block.path())
    assert [type(one) for one in other.settle()] == [LoadBlock, LoadBlock]
    assert other.kept.bytes == 40


def test_files_that_fit_nowhere_are_deleted() -> None:
    """Orphans, texts that are there in another cut, and one digest twice."""
    shelf = Shelf(disk_bytes=PLENTY)
    first = shelf.add(None, 1, 2)
    shelf.add(shelf.add(first, 3, 4), 5)
    shelf.settle()
    whole, middle, last = _saved(shelf)
    cut = SavedBlock(b"x" * 16, whole.parent, 0, (1,), has_state=False, nbytes=10)
    found = Shelf(disk_bytes=PLENTY, saved=(whole, cut, last))
    assert found.kept.disk_tier.count == 1
    assert found.kept.changes == [ForgetSaved((cut.digest,)), ForgetSaved((last.digest,))]
    assert not Shelf(disk_bytes=PLENTY, saved=(middle, last)).kept.disk_tier.count


def test_what_is_found_is_forgotten_again_by_its_digest() -> None:
    """Its namespace need not have been requested before."""
    shelf = Shelf(disk_bytes=PLENTY)
    shelf.add(shelf.add(None, 1, 2), 3, 4)
    shelf.settle()
    saved = _saved(shelf)
    tight = Shelf(disk_bytes=30, saved=saved)
    assert tight.kept.changes == [ForgetSaved((saved[1].digest,))]
    cleared = Shelf(disk_bytes=PLENTY, saved=saved)
    assert cleared.kept.clear(is_disk_included=True) == 2
    assert list(cleared.tree) == []


def test_of_what_is_found_the_longest_unused_goes_first() -> None:
    """When a file was used is known from another day."""
    shelf = Shelf(disk_bytes=PLENTY)
    for number in range(4):
        shelf.add(None, number, 0)
    shelf.settle()
    times = {0: 5.0, 1: 2.0, 2: 9.0, 3: 1.0}
    saved = [replace(one, used_unix_s=times[one.token_ids[0]]) for one in _saved(shelf)]
    found = Shelf(disk_bytes=50, saved=tuple(saved))
    assert {block.token_ids[0] for block in found.tree} == {0, 2}


def test_the_disk_tier_stays_within_its_budget() -> None:
    """The disk tier evicts the lowest priority first, and leaf blocks only."""
    shelf = Shelf(disk_bytes=100)
    parent, tier = None, shelf.kept.disk_tier
    for number in range(30):
        parent = shelf.add(parent if number % 3 else None, number, 0)
        shelf.settle()
        assert tier.bytes <= 100
        for block in shelf.tree:
            assert not block.is_saved or block.before.is_root or block.before.is_saved
    assert tier.count >= 3


def test_what_has_left_memory_stays_on_disk() -> None:
    """And goes for good when neither has it."""
    shelf = Shelf(max_bytes=40, disk_bytes=PLENTY)
    first, second = shelf.add(None, 1, 1), shelf.add(None, 2, 2)
    shelf.add(None, 3, 3)
    shelf.add(None, 4, 4)
    assert shelf.has(first, second) == [False, False]
    assert shelf.tree.walk(shelf.root, (1, 1)).block is first
    assert shelf.kept.clear(is_disk_included=False) == 2
    assert shelf.kept.clear(is_disk_included=True) == 4


def test_clearing_counts_each_block_once_and_spares_what_runs() -> None:
    """A block that is in memory and on disk is one."""
    shelf = Shelf(disk_bytes=PLENTY)
    first = shelf.add(None, 1, 1)
    shelf.add(first, 2, 2)
    shelf.add(None, 3, 3)
    shelf.settle()
    shelf.kept.pin(first)
    assert shelf.kept.clear(is_disk_included=True) == 3
    assert list(shelf.tree) == [first]
    assert shelf.kept.disk_tier.count == 0
    shelf.kept.check_invariants()
    shelf.kept.unpin(first)


def test_a_block_used_again_and_again_costs_no_memory() -> None:
    """The order of eviction forgets what no longer holds."""
    shelf = Shelf()
    block = shelf.add(None, 1, 1)
    for _ in range(10_000):
        shelf.kept.pin(block)
        shelf.kept.use([block])
        shelf.kept.unpin(block)
    assert len(shelf.kept._order) < 200


def _run_through(shelf: Shelf) -> list[list[BlockChange]]:
    """Steps until nothing is left to be done."""
    steps = []
    while shelf.kept.changes:
        steps.append(shelf.settle())
    return steps


def _chain(shelf: Shelf, length: int) -> list[Block]:
    blocks: list[Block] = []
    for number in range(length):
        blocks.append(shelf.add(blocks[-1] if blocks else None, number, 0))
    return blocks


def test_what_comes_behind_something_that_was_forgotten_brings_it_back() -> None:
    """A block that is confirmed has all before it written first, wherever the gap begins."""
    shelf = Shelf(disk_bytes=PLENTY)
    blocks = _chain(shelf, 3)
    _run_through(shelf)
    shelf.kept.pin(blocks[-1])
    shelf.kept.clear(is_disk_included=True)
    blocks.append(shelf.add(blocks[-1], 9))
    saved = [
        one.block_id for step in _run_through(shelf) for one in step if isinstance(one, SaveBlock)
    ]
    assert saved == [block.block_id for block in blocks]
    shelf.kept.unpin(blocks[2])


def test_what_was_not_written_is_written_when_it_is_used_again() -> None:
    """It counts as not there from when that is known, and is not tried for its own sake."""
    shelf = Shelf(disk_bytes=PLENTY)
    blocks = _chain(shelf, 3)
    _run_through(shelf)
    shelf.kept.confirm((), (), (blocks[0].digest, blocks[1].digest, b"nobody knows"))
    assert (shelf.kept.disk_tier.count, shelf.kept.disk_tier.bytes) == (1, 20)
    for step in _run_through(shelf):
        assert all(isinstance(one, ForgetSaved) for one in step)
    shelf.kept.use(blocks)
    shelf.kept.confirm((), ())
    saved = [one.block_id for one in shelf.kept.changes if isinstance(one, SaveBlock)]
    assert saved == [blocks[0].block_id, blocks[1].block_id]
    assert shelf.kept.disk_tier.count == 3
    shelf.kept.check_invariants()


def test_what_is_neither_written_nor_in_memory_is_gone() -> None:
    """Its descendants, now unreachable, go with it."""
    shelf = Shelf(disk_bytes=PLENTY)
    blocks = _chain(shelf, 3)
    _run_through(shelf)
    shelf.kept.clear(is_disk_included=False)
    shelf.settle()
    shelf.kept.confirm((), (), (blocks[1].digest,))
    assert list(shelf.tree) == [blocks[0]]
    shelf.kept.check_invariants()


def test_a_step_writes_only_so_many_blocks() -> None:
    """The others come with the next ones, what comes before first."""
    shelf = Shelf(disk_bytes=PLENTY)
    parent, blocks = shelf.root, []
    for number in range(100):
        block = shelf.kept.store(parent, (number,), ROW)
        assert block is not None
        parent = block
        blocks.append(block)
    steps = _run_through(shelf)
    saves = [[one.block_id for one in step if isinstance(one, SaveBlock)] for step in steps]
    assert [len(one) for one in saves] == [0, 32, 32, 32, 4]
    assert [one for step in saves for one in step] == [block.block_id for block in blocks]


def test_a_step_reads_only_so_many_blocks() -> None:
    """The caller learns whether the rest waits for a later step or has no room."""
    shelf = Shelf(disk_bytes=PLENTY)
    blocks = _chain(shelf, 40)
    _run_through(shelf)
    shelf.kept.clear(is_disk_included=False)
    shelf.settle()
    assert shelf.kept.load(blocks)
    assert len(shelf.settle()) == 32
    assert not shelf.kept.load(blocks[32:])
    assert len(shelf.settle()) == 8
    shelf.kept.clear(is_disk_included=False)
    shelf.settle()
    shelf.kept.set_limits(PrefixLimits(100, disk_bytes=PLENTY))
    assert not shelf.kept.load(blocks)
    assert len(shelf.settle()) == 5


def test_a_limit_bounds_blocks_that_take_nothing() -> None:
    """Without positions and state a block counts for what is kept about it, on both tiers."""
    costs = BlockCosts(0, 4096)
    assert Shelf(max_bytes=0, costs=costs).kept.store(Block(-1, None, 0, ()), (1,), ROW) is None
    assert not Shelf(max_bytes=0, costs=costs).kept.can_keep(16)
    shelf = Shelf(max_bytes=20 * 4096, disk_bytes=PLENTY, costs=costs)
    for number in range(50):
        block = shelf.kept.store(shelf.root, (number,), ROW)
        assert block is not None
        shelf.kept.changes.clear()
        shelf.kept.confirm([HeldBlock(block.block_id, 0)], ())
    assert len(shelf.kept) == 20
    assert shelf.kept.bytes == 20 * 4096
    assert shelf.kept.disk_tier.bytes == 50 * 4096
    assert shelf.kept.disk_tier.file_bytes == 50 * (4096 + 6 * 1024)
    shelf.kept.disk_tier.set_limit(20 * 10_240)
    assert shelf.kept.disk_tier.count == 20
    found = SavedBlock(b"d" * 16, shelf.root.digest, 0, (99,), has_state=False, nbytes=0)
    other = Shelf(disk_bytes=PLENTY, costs=costs, saved=(found,))
    assert other.kept.disk_tier.bytes == 4096


def test_files_count_for_more_than_what_is_in_them() -> None:
    """A budget of disk is one of files."""
    shelf = Shelf(disk_bytes=100, costs=BlockCosts(10, 0, 0, 30))
    for number in range(5):
        shelf.add(None, number, 0)
        shelf.settle()
    assert shelf.kept.disk_tier.count == 2
    assert shelf.kept.disk_tier.bytes == 40


def test_the_budget_of_disk_holds_while_a_block_is_cut() -> None:
    """Two halves have a header each; another block goes for it."""
    shelf = Shelf(disk_bytes=100, costs=BlockCosts(10, 0, 0, 30))
    other, block = shelf.add(None, 1, 2), shelf.add(None, 3, 4)
    shelf.settle()
    assert shelf.kept.disk_tier.file_bytes == 100
    shelf.kept.split(block, 1)
    assert shelf.kept.disk_tier.file_bytes == 80
    assert not other.is_saved
    shelf.kept.check_invariants()


def test_the_budget_of_disk_holds_while_a_block_is_stored_anew() -> None:
    """It may take more than the engine said of it the last time; another block goes for it."""
    shelf = Shelf(disk_bytes=30)
    block = shelf.kept.store(shelf.root, (1, 2), ROW)
    assert block is not None
    shelf.kept.confirm([HeldBlock(block.block_id, 10)], ())
    other = shelf.add(None, 3, 4)
    assert shelf.kept.disk_tier.file_bytes == 30
    shelf.kept.use([block])
    assert shelf.kept.store_anew(block, ROW)
    assert shelf.kept.disk_tier.file_bytes == 20
    assert not other.is_saved
    shelf.kept.check_invariants()


def test_clearing_tells_the_engine_once() -> None:
    """Not once for each block."""
    shelf = Shelf(disk_bytes=PLENTY)
    blocks = _chain(shelf, 20)
    _run_through(shelf)
    digests = {block.digest for block in blocks}
    assert shelf.kept.clear(is_disk_included=True) == 20
    forgotten, dropped = shelf.kept.changes
    assert isinstance(forgotten, ForgetSaved)
    assert isinstance(dropped, DropBlocks)
    assert set(forgotten.digests) == digests
    assert set(dropped.block_ids) == {block.block_id for block in blocks}
    shelf.kept.check_invariants()
