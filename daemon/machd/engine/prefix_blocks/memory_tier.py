"""The blocks that are in memory: copied out of rows, cut, filled into rows, given back.

Lives on the engine thread. Who uses a block how often and what is kept is the scheduler's; here a
block is a number with arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Protocol, TypeVar

import mlx.core as mx
import structlog

from machd.clock import Clock, SystemClock
from machd.engine.backend.untyped import Cache
from machd.engine.kv.row_planes import StandingRow
from machd.engine.prefix_blocks.arrays import BlockArrays, copy_of_row, fill_caches
from machd.engine.prefix_blocks.content import BlockContent
from machd.engine.prefix_blocks.conversion import BlockForm, content_of
from machd.engine.protocol.blocks import (
    BlockChange,
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
from machd.engine.protocol.engine import DiskReading

_CLOSE_WITHIN_S = 10.0
"""For writing what is not written yet."""

_REPORT_INTERVAL_S = 60.0

_Made = TypeVar("_Made")

FindRow = Callable[[int], StandingRow | None]
"""A slot's row, or None where it has none that blocks can be copied from."""


class BlockStorage(Protocol):
    """Where blocks can be besides memory: :class:`machd.engine.prefix_blocks.disk_tier.DiskTier`."""

    def save(self, saved: SavedBlock, content: BlockContent) -> None:
        """Have a block kept. Never waits, never raises."""
        ...

    def load(self, saved: SavedBlock) -> BlockContent | None:
        """A block's content; None where it is not there, or not as it was."""
        ...

    def forget(self, digests: Sequence[bytes]) -> None:
        """Have blocks deleted; those that are not there are no fault."""
        ...

    def take_unsaved(self) -> tuple[bytes, ...]:
        """Digests of what was to be kept and is not, since this was last asked."""
        ...

    def saved(self) -> tuple[SavedBlock, ...]:
        """What was found at the start and is still there."""
        ...

    def reading(self) -> DiskReading:
        """How it does."""
        ...

    def close(self, within_s: float) -> None:
        """Keep what is not kept yet, for so long at most."""
        ...


@dataclass(slots=True)
class BlockOutcome:
    """What became of a plan's changes.

    Attributes:
        held: Blocks that are in memory since, or changed their size.
        lost: Those that could not be had.
        unsaved: Digests of what the disk tier does not keep.
        dropped_bytes: What was given back.
    """

    held: dict[int, HeldBlock] = field(default_factory=dict)
    lost: list[int] = field(default_factory=list)
    unsaved: list[bytes] = field(default_factory=list)
    dropped_bytes: int = 0


class MemoryTier:
    """Blocks by their numbers."""

    def __init__(self, files: BlockStorage | None = None, clock: Clock | None = None) -> None:
        """Begin with none.

        Args:
            files: The disk tier, if there is one.
            clock: Reads time; the machine's unless given.
        """
        self._files = files
        self._clock = clock or SystemClock()
        self._failed_count = 0
        self._reported_s: float | None = None
        self._blocks: dict[int, BlockArrays] = {}
        self._form: BlockForm | None = None

    @property
    def nbytes(self) -> int:
        """What all blocks take."""
        return sum(block.nbytes for block in self._blocks.values())

    @property
    def has_files(self) -> bool:
        """Whether there is a disk tier."""
        return self._files is not None

    def learn(self, row: StandingRow) -> None:
        """Take a row as the pattern of blocks that are loaded: its shapes, whatever it computed."""
        self._form = BlockForm.of(copy_of_row(row, 0, row.length, has_state=True))

    def apply(self, changes: Sequence[BlockChange], find_row: FindRow) -> BlockOutcome:
        """Make changes in their order.

        One that fails costs its own blocks, which are lost or not saved; only what cannot be by our
        own rules is raised.
        """
        outcome = BlockOutcome()
        for kind, group in groupby(changes, type):
            if kind is StoreBlock:
                # Together, because the program waits for them.
                self._store(
                    [one for one in group if isinstance(one, StoreBlock)], find_row, outcome
                )
                continue
            for change in group:
                self._make(change, outcome)
        if self._files is not None:
            outcome.unsaved += self._files.take_unsaved()
        return outcome

    def fill(self, caches: Sequence[Cache], reused: ReusedPrefix) -> None:
        """Fill a row's empty caches with the beginning of its prompt."""
        missing = set(reused.block_ids) - self._blocks.keys()
        assert not missing, (
            f"a row is opened from blocks that are held, and these are not: {missing}"
        )
        blocks = [self._blocks[block_id] for block_id in reused.block_ids]
        fill_caches(caches, blocks, len(reused.token_ids))

    def saved(self) -> tuple[SavedBlock, ...]:
        """What the disk tier has."""
        return () if self._files is None else self._files.saved()

    def reading(self) -> DiskReading | None:
        """How the disk tier does; None without one."""
        return None if self._files is None else self._files.reading()

    def close(self) -> None:
        """Drop all blocks, and let the disk tier write what it was given."""
        self._blocks.clear()
        if self._files is not None:
            self._files.close(_CLOSE_WITHIN_S)

    def _make(self, change: BlockChange, outcome: BlockOutcome) -> None:
        match change:
            case SplitBlock():
                self._split(change, outcome)
            case DropBlocks():
                for block_id in change.block_ids:
                    block = self._blocks.pop(block_id, None)
                    outcome.held.pop(block_id, None)
                    outcome.dropped_bytes += 0 if block is None else block.nbytes
            case LoadBlock():
                block = self._tried(lambda: self._loaded(change.saved))
                self._keep(change.block_id, block, outcome)
            case SaveBlock():
                if not self._tried(lambda: self._saved(change)):
                    outcome.unsaved.append(change.saved.digest)
            case ForgetSaved() if self._files is not None:
                self._files.forget(change.digests)

    def _store(
        self, changes: Sequence[StoreBlock], find_row: FindRow, outcome: BlockOutcome
    ) -> None:
        rows = [find_row(change.slot_index) for change in changes]
        copies = self._tried(lambda: _copies(changes, rows))
        if copies is None:
            # What there was no room for at once may go one by one, and the others need not go with
            # the one that fails.
            copies = [
                one
                for change, row in zip(changes, rows, strict=True)
                for one in self._tried(partial(_copies, [change], [row])) or [None]
            ]
        for change, copy in zip(changes, copies, strict=True):
            self._keep(change.block_id, copy, outcome)

    def _split(self, change: SplitBlock, outcome: BlockOutcome) -> None:
        block = self._blocks.pop(change.block_id, None)
        halves = None if block is None else self._tried(lambda: _halves(block, change.at))
        head, tail = halves or (None, None)
        self._keep(change.head_id, head, outcome)
        self._keep(change.block_id, tail, outcome)

    def _saved(self, change: SaveBlock) -> bool:
        block = self._blocks.get(change.block_id)
        if self._files is None or block is None:
            return False
        self._files.save(change.saved, content_of(block))
        return True

    def _loaded(self, saved: SavedBlock) -> BlockArrays | None:
        content = None if self._files is None else self._files.load(saved)
        if content is None or self._form is None:
            return None
        return self._form.block_of(content, len(saved.token_ids))

    def _tried(self, make: Callable[[], _Made]) -> _Made | None:
        """What is made; None where that fails for want of memory, or whatever a library raises."""
        try:
            return make()
        except AssertionError:
            raise  # a bug of ours
        except Exception as error:  # noqa: BLE001 - a block is lost, and no row with it
            self._failed_count += 1
            now_s = self._clock.monotonic_s()
            if self._reported_s is None or now_s - self._reported_s >= _REPORT_INTERVAL_S:
                self._reported_s = now_s
                structlog.get_logger("machd.engine").error(
                    "blocks.change_failed", count=self._failed_count, exc_info=error
                )
            return None

    def _keep(self, block_id: int, block: BlockArrays | None, outcome: BlockOutcome) -> None:
        if block is None:
            outcome.held.pop(block_id, None)
            outcome.lost.append(block_id)
            return
        assert block_id not in self._blocks, "a new block has a number of its own"
        self._blocks[block_id] = block
        has_state = block.state is not None
        outcome.held[block_id] = HeldBlock(block_id, block.nbytes, has_state)


def _copies(
    changes: Sequence[StoreBlock], rows: Sequence[StandingRow | None]
) -> list[BlockArrays | None]:
    """Copies of rows, computed; None where there is no such row, or what it has is no number."""
    copies = [_copy(change, row) for change, row in zip(changes, rows, strict=True)]
    flags = [None if one is None else one.has_no_number() for one in copies]
    # Or what is copied would keep the whole row alive, and the row could not grow in place.
    mx.eval([one.arrays for one in copies if one is not None], flags)
    # What went wrong in one row must not come back in others.
    return [
        None if flag is None or flag.item() else copy
        for copy, flag in zip(copies, flags, strict=True)
    ]


def _halves(block: BlockArrays, at: int) -> tuple[BlockArrays, BlockArrays]:
    head, tail = block.cut(at)
    mx.eval(head.arrays, tail.arrays)
    return head, tail


def _copy(change: StoreBlock, row: StandingRow | None) -> BlockArrays | None:
    if row is None or row.length < change.stop:
        return None
    return copy_of_row(row, change.start, change.stop, has_state=change.has_state)
