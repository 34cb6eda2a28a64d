"""Rows that leave blocks and rows that begin with them, as a scheduler would ask for them.

Blocks are numbered from 1 on; a helper of a test, so every answer is held against what was asked.
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
from machd.engine.protocol.engine import DiskReading, Engine
from machd.engine.protocol.sampling import SamplingParams
from machd.engine.protocol.step import (
    DecodeRow,
    Lane,
    PrefillChunk,
    SampledToken,
    StepPlan,
    StepResult,
)

ASKED = SamplingParams(temperature=0.0, top_logprobs=2)
"""Greedy, with log-probabilities to compare."""

_RESERVED = 40


class FilesInMemory(DiskTier):
    """Stands in for the disk tier: content by digest, saved at once."""

    def __init__(self) -> None:
        """Begin with none."""
        self.contents: dict[bytes, tuple[SavedBlock, BlockContent]] = {}
        self.closed_within_s: float | None = None
        self.dropped_saves: set[bytes] = set()
        self._unsaved: list[bytes] = []

    def save(self, saved: SavedBlock, content: BlockContent) -> None:
        """Keep it, unless it is to be dropped."""
        if saved.digest in self.dropped_saves:
            self._unsaved.append(saved.digest)
            return
        self.contents[saved.digest] = (saved, content)

    def load(self, saved: SavedBlock) -> BlockContent | None:
        """Give it back."""
        _, content = self.contents.get(saved.digest, (None, None))
        return content

    def forget(self, digests: Iterable[bytes]) -> None:
        """Delete."""
        for digest in digests:
            self.contents.pop(digest, None)

    def take_unsaved(self) -> tuple[bytes, ...]:
        """What was dropped."""
        unsaved, self._unsaved = tuple(self._unsaved), []
        return unsaved

    def saved(self) -> tuple[SavedBlock, ...]:
        """All there are."""
        return tuple(saved for saved, _ in self.contents.values())

    def reading(self) -> DiskReading:
        """How many bytes there are."""
        return DiskReading(sum(content.nbytes for _, content in self.contents.values()))

    def close(self, within_s: float) -> None:
        """Note that it was."""
        self.closed_within_s = within_s


def saved_block(held: HeldBlock, token_ids: Sequence[int], start: int) -> SavedBlock:
    """A block as the disk tier names it."""
    digest = repr((start, tuple(token_ids))).encode()
    return SavedBlock(digest, b"", start, tuple(token_ids), held.has_state, held.nbytes)


@dataclass
class BlockRows:
    """An engine, driven by hand."""

    engine: Engine
    next_id: int = 1

    def new_id(self) -> int:
        """A number that no block has."""
        self.next_id += 1
        return self.next_id - 1

    def run(self, plan: StepPlan) -> StepResult:
        """One step that nothing may go wrong in."""
        result = self.engine.run(plan)
        assert not result.faults
        return result

    def change(self, *changes: BlockChange) -> StepResult:
        """A step of changes alone."""
        return self.run(StepPlan(blocks=changes))

    def store(
        self, slot_index: int, start: int, stop: int, *, has_state: bool = False
    ) -> HeldBlock:
        """A block of a row, which has to work."""
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
        """Give blocks back."""
        self.change(DropBlocks(block_ids))

    def prompt_blocks(
        self, prompt: Sequence[int], stops: Sequence[int], slot_index: int = 0
    ) -> tuple[int, ...]:
        """Blocks with state at each stop, of a row that is only prefilled, and left in its slot."""
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
        """Free slots."""
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
        """Some of a prompt's tokens; with blocks, those before come out of them."""
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
        """A row from its only chunk on to so many tokens, while other slots decode with it."""
        rows = tuple(DecodeRow(one) for one in others)
        tokens = self.tokens(StepPlan(prefill=(opening,), decode=rows))[opening.slot_index]
        own = (*rows, DecodeRow(opening.slot_index))
        if opening.lane is Lane.SERIAL:
            own = own[-1:]
        while len(tokens) < count:
            tokens += self.tokens(StepPlan(decode=own))[opening.slot_index]
        return tokens[:count]

    def tokens(self, plan: StepPlan) -> Mapping[int, list[SampledToken]]:
        """A step's tokens by slot; none for a slot without."""
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
        """What a prompt says without blocks, in slot 0, which is free before and after."""
        chunk = self.chunk(prompt, 0, len(prompt), sampling=sampling)
        tokens = self.generate(chunk, count)
        self.release(0)
        return tokens

    def reusing(
        self, prompt: Sequence[int], length: int, block_ids: Sequence[int], count: int, **how: Lane
    ) -> list[SampledToken]:
        """What it says if its first ``length`` tokens come out of blocks; the same slot."""
        chunk = replace(
            self.chunk(prompt, length, len(prompt), block_ids=block_ids),
            lane=how.get("lane", Lane.BATCH),
        )
        tokens = self.generate(chunk, count)
        self.release(0)
        return tokens
