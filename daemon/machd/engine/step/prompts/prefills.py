"""All prompts that are being computed: :meth:`Prefills.run` computes the chunks of one step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from machd.engine.backend.untyped import Cache
from machd.engine.kv.kv_format import KvFormat
from machd.engine.kv.lane_kv import CachedRow
from machd.engine.kv.row_caches import make_room
from machd.engine.protocol.engine import ModelDescription
from machd.engine.protocol.step import PrefillChunk
from machd.engine.step.decode_pass import Forward, Packing
from machd.engine.step.ports import BlockTier, PromptMedia
from machd.engine.step.prompts.prefill import Prefill
from machd.engine.step.prompts.strategies import (
    DecodeBeside,
    Packed,
    Padded,
    PromptStep,
    PromptStrategy,
    Scored,
    Single,
)


class Prefills:
    """All prompts that are being computed, by slot."""

    def __init__(  # noqa: PLR0913 - one argument for each part of the engine
        self,
        forward: Forward,
        make_caches: Callable[[], list[Cache]],
        blocks: BlockTier,
        model: ModelDescription,
        kv_format: KvFormat,
        *,
        media: PromptMedia,
        packing: Packing,
    ) -> None:
        """Begin without prompts.

        Args:
            forward: The model.
            make_caches: Makes empty caches of one row.
            blocks: Blocks that prompts may begin with.
            model: Description of the model.
            kv_format: Format of keys and values.
            media: Images and videos of prompts.
            packing: Lays chunks into one pass.
        """
        self._make_caches = make_caches
        self._blocks = blocks
        self._vocabulary_tokens = model.vocabulary_tokens
        self._strategies: tuple[PromptStrategy, ...] = (
            Packed(forward, packing),
            Padded(forward, model.cache, kv_format, media),
            Scored(forward),
            Single(forward, media),
        )
        self._open: dict[int, Prefill] = {}

    def __bool__(self) -> bool:
        """True while a prompt is being computed."""
        return bool(self._open)

    @property
    def kv_bytes(self) -> int:
        """Bytes that the prompts' caches hold."""
        return sum(prefill.kv_bytes for prefill in self._open.values())

    def cached_row(self, slot_index: int) -> CachedRow | None:
        """Locate a slot's row; None if its prompt is not being computed."""
        prefill = self._open.get(slot_index)
        return None if prefill is None else prefill.cached_row

    def run(self, chunks: Sequence[PrefillChunk], beside: DecodeBeside | None = None) -> PromptStep:
        """Compute chunks, together where that costs less; a prompt that fails is removed.

        Args:
            chunks: At most one of each prompt.
            beside: Decodes the batch's rows in the pass of the chunks, if they are all computed in one; None if
                the plan decodes other rows, or none.
        """
        step = PromptStep(beside)
        if not chunks:
            return step
        prefills: Sequence[Prefill] = [self._opened(chunk) for chunk in chunks]
        for strategy in self._strategies:
            prefills = strategy.compute(prefills, step)
        self.drop(fault.slot_index for fault in step.decoded.faults)
        step.whole = [
            one.slot_index for one in chunks if one.is_last and one.slot_index in self._open
        ]
        return step

    def pop(self, slot_index: int) -> Prefill:
        """Remove and return a prompt."""
        return self._open.pop(slot_index)

    def drop(self, slot_indices: Iterable[int]) -> None:
        """Remove the prompts of these slots, if any."""
        for slot_index in slot_indices:
            self._open.pop(slot_index, None)

    def clear(self) -> None:
        """Remove all prompts."""
        self._open.clear()

    def _opened(self, chunk: PrefillChunk) -> Prefill:
        """Return the chunk's prompt, which an opening chunk begins."""
        if chunk.opens:
            assert chunk.slot_index not in self._open, "a slot is freed before it is taken"
            caches = self._make_caches()
            if chunk.reused is not None:
                self._blocks.fill(caches, chunk.reused)
            make_room(caches, chunk.opened_tokens)
            self._open[chunk.slot_index] = Prefill(chunk, caches, self._vocabulary_tokens)
        prefill = self._open[chunk.slot_index]
        prefill.chunk = chunk
        return prefill
