"""All prompts that are being computed: :meth:`Prefills.run` computes the chunks of one step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from machd.engine.kv.lane_kv import CachedRow
from machd.engine.protocol.slab_size import COLUMN_STEP
from machd.engine.protocol.step import PrefillChunk
from machd.engine.step.decode_pass import ChooseAdapters, Forward, Packing
from machd.engine.step.ports import BlockTier, PromptMedia
from machd.engine.step.prompts.prefill import Prefill
from machd.engine.step.prompts.strategies import (
    DecodeWith,
    Packed,
    Padded,
    PromptStep,
    PromptStrategy,
    Scored,
    Single,
)

if TYPE_CHECKING:
    from machd.engine.kv.model_kv import ModelKv


class Prefills:
    """All prompts that are being computed, by slot."""

    def __init__(  # noqa: PLR0913 - each is a part of the engine
        self,
        forward: Forward,
        kv: ModelKv,
        blocks: BlockTier,
        vocabulary_tokens: int,
        media: PromptMedia,
        packing: Packing,
        *,
        choose_adapters: ChooseAdapters,
    ) -> None:
        """Begin without prompts.

        Args:
            forward: The model.
            kv: Makes caches.
            blocks: Blocks that prompts may begin with.
            vocabulary_tokens: Width of the logits.
            media: Images and videos of prompts.
            packing: Lays chunks into one pass.
            choose_adapters: Chooses the adapters of prompts while a pass is built.
        """
        self._kv = kv
        self._blocks = blocks
        self._vocabulary_tokens = vocabulary_tokens
        self._strategies: tuple[PromptStrategy, ...] = (
            Packed(forward, packing, choose_adapters),
            Padded(forward, kv, media, choose_adapters),
            Scored(forward, choose_adapters),
            Single(forward, media, choose_adapters),
        )
        self._prefills: dict[int, Prefill] = {}

    def __bool__(self) -> bool:
        """True while a prompt is being computed."""
        return bool(self._prefills)

    @property
    def kv_bytes(self) -> int:
        """Bytes that the prompts' caches hold."""
        return sum(prefill.kv_bytes for prefill in self._prefills.values())

    def cached_row(self, slot_index: int) -> CachedRow | None:
        """Locate a slot's row; None if its prompt is not being computed."""
        prefill = self._prefills.get(slot_index)
        return None if prefill is None else prefill.cached_row

    def run(
        self, chunks: Sequence[PrefillChunk], decode_with: DecodeWith | None = None
    ) -> PromptStep:
        """Compute chunks, together where that costs less; a prompt that fails is removed.

        Args:
            chunks: At most one of each prompt.
            decode_with: Decodes the batch's rows and computes chunks in one pass; None if the plan decodes
                other rows, or none. A strategy that calls it sets ``has_decoded``.
        """
        step = PromptStep(decode_with)
        if not chunks:
            return step
        prefills: Sequence[Prefill] = [self._prefill_of(chunk) for chunk in chunks]
        for strategy in self._strategies:
            prefills = strategy.compute(prefills, step)
        self.drop(fault.slot_index for fault in step.result.faults)
        step.whole = [
            one.slot_index for one in chunks if one.is_last and one.slot_index in self._prefills
        ]
        return step

    def pop(self, slot_index: int) -> Prefill:
        """Remove and return a whole prompt, with room for its completion to grow into."""
        prefill = self._prefills.pop(slot_index)
        self._kv.make_room(prefill.caches, COLUMN_STEP)
        return prefill

    def drop(self, slot_indices: Iterable[int]) -> None:
        """Remove the prompts of these slots, if any."""
        for slot_index in slot_indices:
            self._prefills.pop(slot_index, None)

    def clear(self) -> None:
        """Remove all prompts."""
        self._prefills.clear()

    def _prefill_of(self, chunk: PrefillChunk) -> Prefill:
        """Return the chunk's prompt, which its first chunk begins."""
        if chunk.opens:
            assert chunk.slot_index not in self._prefills, "a slot is freed before it is taken"
            caches = self._kv.row_caches()
            if chunk.reused is not None:
                self._blocks.fill(caches, chunk.reused)
            self._kv.make_room(caches, chunk.opened_tokens)
            self._prefills[chunk.slot_index] = Prefill(chunk, caches, self._vocabulary_tokens)
        prefill = self._prefills[chunk.slot_index]
        prefill.chunk = chunk
        return prefill
