"""The memory tier of the prefix cache: blocks are copied out of rows, cut, put into rows, dropped.

Lives on the engine thread. The scheduler knows which tokens a block stands for and decides what is
kept; here a block is a number with arrays. Blocks are saved to and loaded from the disk tier, if
there is one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import TypeVar

import mlx.core as mx
import structlog

from machd.clock import Clock, SystemClock, Throttle
from machd.engine.backend.untyped import Cache
from machd.engine.kv.lane_kv import CachedRow
from machd.engine.prefix_blocks.arrays import BlockArrays, copy_of_row, fill_caches
from machd.engine.prefix_blocks.conversion import BlockForm, content_of
from machd.engine.prefix_blocks.disk_tier import DiskTier
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

_CLOSE_WITHIN_S = 10.0
"""Time for writing blocks that are queued when the engine closes."""

_Made = TypeVar("_Made")

FindRow = Callable[[int], CachedRow | None]
"""Gives a slot's row, or None where it has none that blocks can be copied from."""

_Source = CachedRow | BlockArrays | None
"""A row, or the copy of one that left."""


@dataclass(slots=True)
class _Done:
    """The effect of the changes so far: blocks that were to be made, and digests that were not saved, as keys."""

    made: dict[int, bool] = field(default_factory=dict)
    unsaved: dict[bytes, None] = field(default_factory=dict)
    dropped_bytes: int = 0


class MemoryTier:
    """Blocks by their numbers, and copies of rows that left before their slots were released."""

    def __init__(
        self,
        disk_tier: DiskTier | None = None,
        form: BlockForm | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Begin without blocks. The disk tier is closed by this class; without a form no block can be loaded from it."""
        self._disk_tier = disk_tier
        self._form = form
        self._failed_count = 0
        self._failure_reports = Throttle(clock or SystemClock())
        self._blocks: dict[int, BlockArrays] = {}
        self._left_rows: dict[int, BlockArrays] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        return sum(block.nbytes for block in self._blocks.values())

    @property
    def row_bytes(self) -> int:
        """Bytes of the copies of rows that left."""
        return sum(row.nbytes for row in self._left_rows.values())

    def apply(self, changes: Sequence[BlockChange], find_row: FindRow) -> BlockOutcome:
        """Make changes in their order.

        A change that fails costs its own blocks, which are lost or not saved. Only an
        AssertionError, a bug of ours, is raised.
        """
        done = _Done()
        for kind, group in groupby(changes, type):
            if kind is StoreBlock:
                # Together, because the program waits for them.
                stores = [one for one in group if isinstance(one, StoreBlock)]
                done.made |= self._store(stores, find_row)
            else:
                for change in group:
                    self._change(change, done)
        if self._disk_tier is not None:
            done.unsaved |= dict.fromkeys(self._disk_tier.take_unsaved())
        held = [(one, self._blocks[one]) for one in done.made if one in self._blocks]
        return BlockOutcome(
            tuple(HeldBlock(number, one.nbytes, one.state is not None) for number, one in held),
            tuple(block_id for block_id, is_held in done.made.items() if not is_held),
            tuple(done.unsaved),
            done.dropped_bytes,
        )

    def fill(self, caches: Sequence[Cache], reused: ReusedPrefix) -> None:
        """Fill a row's empty caches with the beginning of its prompt."""
        missing = set(reused.block_ids) - self._blocks.keys()
        assert not missing, (
            f"a row is opened from blocks that are held, and these are not: {missing}"
        )
        blocks = [self._blocks[block_id] for block_id in reused.block_ids]
        fill_caches(caches, blocks, len(reused.token_ids))

    def keep_row(self, slot_index: int, row: CachedRow) -> None:
        """Copy a row that leaves before its slot is released, so that blocks can still be made of it.

        Looking ahead, a row leaves once its last token is chosen, a step before the scheduler has
        seen that token. The device copies the row before it computes the next pass.
        """
        if row.length:
            copy = self._left_rows[slot_index] = copy_of_row(row, 0, row.length, has_state=True)
            mx.async_eval(copy.arrays)

    def forget_rows(self, slot_indices: Iterable[int] | None = None) -> None:
        """Drop the copies of these slots' rows; of all rows unless given."""
        for slot_index in list(self._left_rows) if slot_indices is None else slot_indices:
            self._left_rows.pop(slot_index, None)

    def saved(self) -> tuple[SavedBlock, ...]:
        """List the disk tier's blocks."""
        return () if self._disk_tier is None else self._disk_tier.saved()

    def reading(self) -> DiskReading | None:
        """Read the disk tier's counts; None without one."""
        return None if self._disk_tier is None else self._disk_tier.reading()

    def close(self) -> None:
        """Drop all blocks, and let the disk tier write those that are queued."""
        self._blocks.clear()
        self._left_rows.clear()
        if self._disk_tier is not None:
            self._disk_tier.close(_CLOSE_WITHIN_S)

    def _change(self, change: BlockChange, done: _Done) -> None:
        match change:
            case SplitBlock():
                done.made |= self._split(change)
            case LoadBlock():
                block = self._tried(partial(self._load, change.saved))
                done.made[change.block_id] = self._keep(change.block_id, block)
            case DropBlocks():
                dropped = [self._blocks.pop(block_id, None) for block_id in change.block_ids]
                done.dropped_bytes += sum(one.nbytes for one in dropped if one is not None)
            case SaveBlock():
                if not self._tried(partial(self._save, change)):
                    done.unsaved[change.saved.digest] = None
            case ForgetSaved() if self._disk_tier is not None:
                self._disk_tier.forget(change.digests)

    def _store(self, changes: Sequence[StoreBlock], find_row: FindRow) -> dict[int, bool]:
        sources = [self._source(change, find_row) for change in changes]
        copies = self._tried(lambda: _copies(changes, sources))
        if copies is None:
            # Memory that is too little for all copies at once may do for each alone, and one that
            # fails need not take the others with it.
            copies = [
                copy
                for change, source in zip(changes, sources, strict=True)
                for copy in self._tried(partial(_copies, [change], [source])) or [None]
            ]
        return {
            change.block_id: self._keep(change.block_id, copy)
            for change, copy in zip(changes, copies, strict=True)
        }

    def _source(self, change: StoreBlock, find_row: FindRow) -> _Source:
        row = find_row(change.slot_index)
        return self._left_rows.get(change.slot_index) if row is None else row

    def _split(self, change: SplitBlock) -> dict[int, bool]:
        block = self._blocks.pop(change.block_id, None)
        halves = None if block is None else self._tried(lambda: _halves(block, change.at))
        head, tail = halves or (None, None)
        return {
            change.head_id: self._keep(change.head_id, head),
            change.block_id: self._keep(change.block_id, tail),
        }

    def _save(self, change: SaveBlock) -> bool:
        block = self._blocks.get(change.block_id)
        if self._disk_tier is None or block is None:
            return False
        self._disk_tier.save(change.saved, content_of(block))
        return True

    def _load(self, saved: SavedBlock) -> BlockArrays | None:
        content = None if self._disk_tier is None else self._disk_tier.load(saved)
        if content is None or self._form is None:
            return None
        return self._form.block_of(content, len(saved.token_ids))

    def _tried(self, make: Callable[[], _Made]) -> _Made | None:
        """Call ``make``; None if it fails for want of memory, or with whatever a library raises."""
        try:
            return make()
        except AssertionError:
            raise  # a bug of ours
        except Exception as error:  # noqa: BLE001 - a block is lost, and no row with it
            self._failed_count += 1
            if self._failure_reports.is_due():
                structlog.get_logger("machd.engine").error(
                    "blocks.change_failed", count=self._failed_count, exc_info=error
                )
            return None

    def _keep(self, block_id: int, block: BlockArrays | None) -> bool:
        """Keep a block if it was made; returns whether it was."""
        if block is None:
            return False
        assert block_id not in self._blocks, "a new block has a number of its own"
        self._blocks[block_id] = block
        return True


def _copies(changes: Sequence[StoreBlock], sources: Sequence[_Source]) -> list[BlockArrays | None]:
    """Copy rows, and wait for it; None where there is no such row, or it holds a NaN."""
    copies = [_copy(change, source) for change, source in zip(changes, sources, strict=True)]
    flags = [None if copy is None else copy.has_nan() for copy in copies]
    # An unevaluated copy would keep the whole row alive, and the row could not grow in place.
    mx.eval([copy.arrays for copy in copies if copy is not None], flags)
    # A NaN of one row must not come back in others.
    return [
        None if flag is None or flag.item() else copy
        for copy, flag in zip(copies, flags, strict=True)
    ]


def _copy(change: StoreBlock, source: _Source) -> BlockArrays | None:
    if isinstance(source, BlockArrays) and change.stop <= source.tokens:
        return source.part(change.start, change.stop, has_state=change.has_state)
    if isinstance(source, CachedRow) and change.stop <= source.length:
        return copy_of_row(source, change.start, change.stop, has_state=change.has_state)
    return None


def _halves(block: BlockArrays, at: int) -> tuple[BlockArrays, BlockArrays]:
    halves = block.part(0, at), block.part(at, block.tokens)
    mx.eval([half.arrays for half in halves])
    return halves
