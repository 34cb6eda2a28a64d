"""The blocks of the scripted engine: tokens instead of arrays, so that a wrong block shows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

from machd.engine.protocol.blocks import (
    BlockChange,
    BlockOutcome,
    DropBlocks,
    ForgetSaved,
    HeldBlock,
    LoadBlock,
    ReusedPrefix,
    SaveBlock,
    SavedBlock,
    SplitBlock,
    StoreBlock,
)
from machd.engine.protocol.memory import DiskReading
from machd.request.adapter import Adapter

BYTES_PER_TOKEN = 1024
BYTES_PER_STATE = 4096


@dataclass(frozen=True, slots=True)
class FakeBlock:
    """Tokens and their first position.

    Attributes:
        has_state: Whether a row can be opened at its end.
        state_bytes: Bytes that the state takes.
        adapters: Those of the row that it was copied from.
    """

    start: int
    token_ids: tuple[int, ...]
    has_state: bool
    state_bytes: int
    adapters: tuple[Adapter, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes that it takes in a made-up memory."""
        return len(self.token_ids) * BYTES_PER_TOKEN + self.state_bytes


FakeDisk = dict[bytes, tuple[SavedBlock, FakeBlock]]
"""A disk tier that outlives the engine: blocks by digest."""


@dataclass(slots=True)
class FakeDiskFaults:
    """Faults of the disk tier.

    Attributes:
        lost_loads: Digests of blocks that it has and cannot read.
        dropped_saves: Digests of blocks that it does not write, as the next step reports.
    """

    lost_loads: Collection[bytes] = field(default_factory=set)
    dropped_saves: Collection[bytes] = field(default_factory=set)


class FakeBlocks:
    """Blocks by their numbers."""

    def __init__(self, *, is_stateful: bool, disk: FakeDisk | None, faults: FakeDiskFaults) -> None:
        """Begin with none.

        Args:
            is_stateful: Whether the made-up model has a state, which exists at a row's end alone.
            disk: The disk tier, if there is one.
            faults: Faults of the disk tier.
        """
        self._is_stateful = is_stateful
        self._disk = disk
        self._faults = faults
        self._blocks: dict[int, FakeBlock] = {}
        self._unsaved: dict[bytes, None] = {}
        self._dropped: dict[bytes, None] = {}
        self._adapters_of: Callable[[int], tuple[Adapter, ...]] = lambda _: ()
        self._written = self._loaded = self._dropped_count = 0

    def apply(
        self,
        changes: Sequence[BlockChange],
        computed: Callable[[int], tuple[int, ...]],
        adapters_of: Callable[[int], tuple[Adapter, ...]] = lambda _: (),
    ) -> BlockOutcome:
        """Make a plan's changes in their order.

        Args:
            changes: The plan's.
            computed: Gives the computed tokens of a slot's row; none where there is no row.
            adapters_of: Gives the adapters of a slot's row.
        """
        self._unsaved, self._dropped = self._dropped, {}
        touched: dict[int, bool] = {}
        self._adapters_of = adapters_of
        for change in changes:
            for block_id, block in self._made(change, computed):
                touched[block_id] = block is not None
                if block is not None:
                    assert block_id not in self._blocks, "a new block has a number of its own"
                    self._blocks[block_id] = block
        held = [(one, self._blocks[one]) for one in touched if one in self._blocks]
        return BlockOutcome(
            tuple(HeldBlock(number, block.nbytes, block.has_state) for number, block in held),
            tuple(block_id for block_id, is_held in touched.items() if not is_held),
            tuple(self._unsaved),
        )

    def open(self, reused: ReusedPrefix, adapters: tuple[Adapter, ...] = ()) -> tuple[int, ...]:
        """Return the tokens that a row is opened with, which its blocks have to hold, computed with its adapters."""
        missing = set(reused.block_ids) - self._blocks.keys()
        assert not missing, (
            f"a row is opened from blocks that are held, and these are not: {missing}"
        )
        blocks = [self._blocks[block_id] for block_id in reused.block_ids]
        held: tuple[int, ...] = ()
        for block in blocks:
            assert block.start == len(held), "blocks follow one another from position 0"
            assert block.adapters == adapters, "keys and values of other adapters are others"
            held += block.token_ids
        assert reused.token_ids, "something is reused"
        assert held[: len(reused.token_ids)] == reused.token_ids, "the blocks hold these tokens"
        if self._is_stateful:
            assert blocks[-1].has_state, "the last block has state"
            assert len(held) == len(reused.token_ids), "state is of the block's end"
        return reused.token_ids

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks in memory."""
        return sum(block.nbytes for block in self._blocks.values())

    def saved(self) -> tuple[SavedBlock, ...]:
        """List the disk tier's blocks."""
        return tuple(saved for saved, _ in (self._disk or {}).values())

    def reading(self) -> DiskReading | None:
        """Read the disk tier's counts; None without one."""
        if self._disk is None:
            return None
        held_bytes = sum(block.nbytes for _, block in self._disk.values())
        return DiskReading(held_bytes, self._written, self._loaded, dropped=self._dropped_count)

    def close(self) -> None:
        """Drop all blocks in memory."""
        self._blocks.clear()

    def _made(
        self, change: BlockChange, computed: Callable[[int], tuple[int, ...]]
    ) -> list[tuple[int, FakeBlock | None]]:
        """Make a change; returns a block, or None if it could not be made, for each number."""
        match change:
            case StoreBlock():
                return [(change.block_id, self._copy(change, computed(change.slot_index)))]
            case SplitBlock():
                return self._split(change)
            case LoadBlock():
                return [(change.block_id, self._load(change.saved))]
            case _:
                self._give_up(change)
                return []

    def _give_up(self, change: DropBlocks | SaveBlock | ForgetSaved) -> None:
        """Make a change after which no block is in memory that was not before."""
        match change:
            case DropBlocks():
                for block_id in change.block_ids:
                    self._blocks.pop(block_id, None)
            case SaveBlock():
                self._save(change)
            case ForgetSaved():
                for digest in change.digests:
                    self._forget(digest)

    def _copy(self, change: StoreBlock, computed: tuple[int, ...]) -> FakeBlock | None:
        assert 0 <= change.start < change.stop, "a block has positions"
        if len(computed) < change.stop:
            return None
        has_state = change.has_state and len(computed) == change.stop
        tokens = computed[change.start : change.stop]
        block = self._block(change.start, tokens, has_state=has_state)
        return replace(block, adapters=self._adapters_of(change.slot_index))

    def _block(self, start: int, token_ids: tuple[int, ...], *, has_state: bool) -> FakeBlock:
        if not self._is_stateful:
            return FakeBlock(start, token_ids, has_state=True, state_bytes=0)
        return FakeBlock(start, token_ids, has_state, BYTES_PER_STATE if has_state else 0)

    def _split(self, change: SplitBlock) -> list[tuple[int, FakeBlock | None]]:
        block = self._blocks.pop(change.block_id, None)
        if block is None:
            return [(change.head_id, None), (change.block_id, None)]
        assert 0 < change.at < len(block.token_ids), "both halves have positions"
        head = self._block(block.start, block.token_ids[: change.at], has_state=False)
        head = replace(head, adapters=block.adapters)
        tail = replace(block, start=block.start + change.at, token_ids=block.token_ids[change.at :])
        return [(change.head_id, head), (change.block_id, tail)]

    def _save(self, change: SaveBlock) -> None:
        digest = change.saved.digest
        self._forget(digest)
        block = self._blocks.get(change.block_id)
        if block is None or self._disk is None:
            self._unsaved[digest] = None
            return
        assert change.saved.token_ids == block.token_ids, "a block is saved by its own tokens"
        assert change.saved.start == block.start, "a block is saved by its own positions"
        if digest in self._faults.dropped_saves:
            self._dropped[digest] = None
            self._dropped_count += 1
            return
        self._disk[digest] = (change.saved, block)
        self._written += 1

    def _forget(self, digest: bytes) -> None:
        for kept in (self._unsaved, self._dropped, self._disk or {}):
            kept.pop(digest, None)

    def _load(self, saved: SavedBlock) -> FakeBlock | None:
        if self._disk is None or saved.digest in self._faults.lost_loads:
            return None
        _, block = self._disk.get(saved.digest, (None, None))
        if block is None or (block.start, block.token_ids) != (saved.start, saved.token_ids):
            self._forget(saved.digest)
            self._unsaved[saved.digest] = None
            return None
        self._loaded += 1
        return block
