"""Rows that leave blocks and rows that begin with them, asked for as a scheduler does.

Blocks are numbered from 1 on. Every result is compared with what was asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from machd.engine.prefix_blocks.disk_tier import DiskTier
from machd.engine.prefix_blocks.encoding import BlockContent
from machd.engine.protocol.blocks import (
    BlockChange,
    DropBlocks,
    HeldBlock,
    ReusedPrefix,
    SavedBlock,
    SplitBlock,
    StoreBlock,
)
from machd.engine.protocol.engine import Engine
from machd.engine.protocol.memory import DiskReading
from machd.engine.protocol.step import (
    DecodeRow,
    Lane,
    PrefillChunk,
    SampledToken,
    StepPlan,
    StepResult,
)
from machd.request.generation import SamplingParams

ASKED = SamplingParams(temperature=0.0, top_logprobs=2)
"""Greedy, with log-probabilities to compare."""

_RESERVED = 40


class FilesInMemory(DiskTier):
    """A disk tier in memory: content by digest, saved at once."""

    def __init__(self) -> None:
        """Begin with none."""
        self.contents: dict[bytes, tuple[SavedBlock, BlockContent]] = {}
        self.closed_within_s: float | None = None
        self.dropped_saves: set[bytes] = set()
        self._unsaved: list[bytes] = []

    def save(self, saved: SavedBlock, content: BlockContent) -> None:
        """Keep a block, unless it is to be dropped."""
        if saved.digest in self.dropped_saves:
            self._unsaved.append(saved.digest)
            return
        self.contents[saved.digest] = (saved, content)

    def load(self, saved: SavedBlock) -> BlockContent | None:
        """Return a block."""
        _, content = self.contents.get(saved.digest, (None, None))
        return content

    def forget(self, digests: Iterable[bytes]) -> None:
        """Delete blocks."""
        for digest in digests:
            self.contents.pop(digest, None)

    def take_unsaved(self) -> tuple[bytes, ...]:
        """Take the digests of dropped blocks."""
        unsaved, self._unsaved = tuple(self._unsaved), []
        return unsaved

    def saved(self) -> tuple[SavedBlock, ...]:
        """List all blocks."""
        return tuple(saved for saved, _ in self.contents.values())

    def reading(self) -> DiskReading:
        """Count the bytes."""
        return DiskReading(sum(content.nbytes for _, content in self.contents.values()))

    def close(self, within_s: float) -> None:
        """Note that it was closed."""
        self.closed_within_s = within_s


def saved_block(held: HeldBlock, token_ids: Sequence[int], start: int) -> SavedBlock:
    """Make a block as the disk tier names it."""
    digest = repr((start, tuple(token_ids))).encode()
    return SavedBlock(digest, b"", start, tuple(token_ids), held.has_state, held.nbytes)


@dataclass
class BlockRows:
    """An engine, driven by hand."""

    engine: Engine
    next_id: int = 1

    def new_id(self) -> int:
        """Return a number that no block has."""
        self.next_id += 1
        return self.next_id - 1

    def run(self, plan: StepPlan) -> StepResult:
        """Run a step in which no row may fail."""
        result = self.engine.run(plan)
        assert not result.faults
        return result

    def change(self, *changes: BlockChange) -> StepResult:
        """Run a step of changes alone."""
        return self.run(StepPlan(blocks=changes))

    def store(
        self, slot_index: int, start: int, stop: int, *, has_state: bool = False
    ) -> HeldBlock:
        """Store a block of a row, which has to work."""
        block_id = self.new_id()
        result = self.change(StoreBlock(block_id, slot_index, start, stop, has_state))
        assert result.lost_blocks == ()
        (held,) = result.held_blocks
        assert held.block_id == block_id
        return held

    def split(self, block_id: int, at: int) -> tuple[int, int]:
        """Cut a block; returns the numbers of both parts, in order."""
        head_id = self.new_id()
        result = self.change(SplitBlock(block_id, head_id, at))
        assert {one.block_id for one in result.held_blocks} == {head_id, block_id}
        return head_id, block_id

    def drop(self, *block_ids: int) -> None:
        """Drop blocks."""
        self.change(DropBlocks(block_ids))

    def prompt_blocks(
        self, prompt: Sequence[int], stops: Sequence[int], slot_index: int = 0
    ) -> tuple[int, ...]:
        """Store blocks with state at each stop of a row that is only prefilled, and stays in its slot."""
        stored = []
        start = 0
        for stop in stops:
            self.run(StepPlan(prefill=(self.chunk(prompt, start, stop, slot_index),)))
            held = self.store(slot_index, start, stop, has_state=True)
            assert held.has_state
            stored.append(held.block_id)
            start = stop
        return tuple(stored)

    def release(self, *slot_indices: int) -> None:
        """Release slots."""
        self.run(StepPlan(release=slot_indices))

    def chunk(
        self,
        prompt: Sequence[int],
        start: int,
        stop: int,
        slot_index: int = 0,
        *,
        block_ids: Sequence[int] = (),
        lane: Lane = Lane.BATCH,
        sampling: SamplingParams = ASKED,
    ) -> PrefillChunk:
        """Make a chunk of a prompt's tokens; the tokens before it come out of blocks, if there are any."""
        reused = ReusedPrefix(tuple(prompt[:start]), tuple(block_ids)) if block_ids else None
        return PrefillChunk(
            slot_index=slot_index,
            token_ids=tuple(prompt[start:stop]),
            start=start,
            is_last=stop == len(prompt),
            sampling=sampling,
            reserved_tokens=len(prompt) + _RESERVED,
            lane=lane,
            reused=reused,
        )

    def generate(
        self, opening: PrefillChunk, count: int, *, others: Sequence[int] = ()
    ) -> list[SampledToken]:
        """Run a row from its only chunk on to ``count`` tokens, while other slots decode with it."""
        rows = tuple(DecodeRow(one) for one in others)
        tokens = self.tokens(StepPlan(prefill=(opening,), decode=rows))[opening.slot_index]
        own = (*rows, DecodeRow(opening.slot_index))
        if opening.lane is Lane.SERIAL:
            own = own[-1:]
        while len(tokens) < count:
            tokens += self.tokens(StepPlan(decode=own))[opening.slot_index]
        return tokens[:count]

    def tokens(self, plan: StepPlan) -> Mapping[int, list[SampledToken]]:
        """Run a step and sort its tokens by slot; a slot without tokens has an empty list."""
        by_slot: dict[int, list[SampledToken]] = {}
        for chunk in plan.prefill:
            by_slot[chunk.slot_index] = []
        for row in plan.decode:
            by_slot[row.slot_index] = []
        for token in self.run(plan).tokens:
            by_slot[token.slot_index].append(token)
        return by_slot

    def alone(
        self, prompt: Sequence[int], count: int, sampling: SamplingParams = ASKED
    ) -> list[SampledToken]:
        """Generate from a prompt without blocks, in slot 0, which is free before and after."""
        chunk = self.chunk(prompt, 0, len(prompt), sampling=sampling)
        tokens = self.generate(chunk, count)
        self.release(0)
        return tokens

    def reusing(
        self, prompt: Sequence[int], length: int, block_ids: Sequence[int], count: int, **how: Lane
    ) -> list[SampledToken]:
        """Generate from a prompt with its first ``length`` tokens out of blocks, in slot 0."""
        chunk = replace(
            self.chunk(prompt, length, len(prompt), block_ids=block_ids),
            lane=how.get("lane", Lane.BATCH),
        )
        tokens = self.generate(chunk, count)
        self.release(0)
        return tokens
