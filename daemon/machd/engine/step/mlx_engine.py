"""The engine on MLX, and the place to begin reading: :meth:`MlxEngine.run` computes one step.

A prompt is prefilled into caches of its own, then its row joins a lane. The batch lane decodes all of its
rows in one pass; each row of the serial lane has a pass of its own.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module

from machd.engine.backend.device import (
    available_memory_bytes,
    computing_memory_bytes,
    give_memory_back,
)
from machd.engine.backend.untyped import Cache
from machd.engine.kv.lane_kv import CachedRow, JoiningRow, LaneKv
from machd.engine.protocol.adapters import AdapterRoom, ClosableAdapterRoom
from machd.engine.protocol.blocks import SavedBlock
from machd.engine.protocol.media import FIRST_MEDIA_KEY, MediaProcessor
from machd.engine.protocol.memory import MemoryReading
from machd.engine.protocol.slab_size import COLUMN_STEP
from machd.engine.protocol.step import (
    Lane,
    PrefillChunk,
    RowFault,
    StepPlan,
    StepResult,
)
from machd.engine.sampling.sampler import Masks
from machd.engine.sampling.sampling_state import Matcher, SamplingState
from machd.engine.step.decode_pass import NO_FEATURES, Packing, Passes
from machd.engine.step.decoder import Decoder
from machd.engine.step.memory import StepMemory, StepNeed
from machd.engine.step.ports import (
    BlockTier,
    Decider,
    Experts,
    PromptMedia,
    Proposer,
    RowAdapters,
)
from machd.engine.step.prompts.prefill import Prefill
from machd.engine.step.prompts.prefills import Prefills
from machd.engine.step.prompts.scores import scoring_bytes
from machd.engine.step.row import DecoderRow
from machd.request.adapter import Adapter
from machd.request.generation import SamplingParams

if TYPE_CHECKING:
    from machd.engine.kv.model_kv import ModelKv
    from machd.engine.protocol.engine import GrammarCompiler, ModelDescription
    from machd.engine.protocol.tokenizer import Tokenizer

_WARM_UP_TOKENS = 8

_DROPPED_BYTES = 64_000_000
"""Bytes of dropped blocks that mlx may keep for reuse while rows run."""


@dataclass(frozen=True, slots=True)
class EngineParts:
    """Parts of an engine, made by :func:`machd.engine.assembly.engine_parts`.

    Attributes:
        model: mlx-lm's module.
        description: Facts about the model.
        tokenizer: The model's tokenizer.
        kv: Makes the rows' caches and lanes.
        grammars: Compiler of the model's grammars.
        open_matcher: Makes a matcher for a row; None for parameters that allow every token.
        masks: Fills the masks of matchers.
        blocks: Blocks of the prefix cache.
        keep_finished: With look-ahead, takes the slot and the caches of a row that has its last token, before it
            leaves, so that blocks can still be made of it.
        memory: Memory that steps take.
        proposer: Source of draft tokens; None for none.
        looks_ahead: True if each pass is dispatched before the last one's tokens are read.
        packing: Functions of packed passes; see :mod:`machd.engine.step.decode_pass`.
        decider: Decides, with the other ranks where several compute the model.
        experts: Experts on disk.
        media: Images and videos of prompts.
        adapter_room: Adapters in memory.
        row_adapters: Chooses the adapters of a pass's rows.
    """

    model: Any
    description: ModelDescription
    tokenizer: Tokenizer
    kv: ModelKv
    grammars: GrammarCompiler
    open_matcher: Callable[[SamplingParams], Matcher | None]
    masks: Masks
    blocks: BlockTier
    keep_finished: Callable[[int, CachedRow], None]
    memory: StepMemory
    proposer: Proposer | None
    looks_ahead: bool
    packing: Packing
    decider: Decider
    experts: Experts
    media: PromptMedia
    adapter_room: ClosableAdapterRoom
    row_adapters: RowAdapters


class MlxEngine:
    """A model in memory. Made, used and closed on one thread."""

    def __init__(self, parts: EngineParts, *, max_rows: int = 256) -> None:
        """Take the parts over, and compute a first token so that no request waits for it.

        Args:
            parts: Nothing else uses them any more.
            max_rows: Most rows that the batch lane ever has.
        """
        self._model: Any = parts.model
        self._parts = parts
        self._description = parts.description
        self._max_rows = max_rows
        self._blocks = parts.blocks
        self._dropped_bytes = 0
        self._prefills = Prefills(
            self._forward_or_raise,
            parts.kv,
            parts.blocks,
            parts.description.vocabulary_tokens,
            parts.media,
            parts.packing,
            choose_adapters=self._choose_adapters,
        )
        self._batch = self._decoder(parts.kv.batch_lane(max_rows))
        self._serial: dict[int, Decoder] = {}
        self._memory = parts.memory
        self._warm_up()

    @property
    def model(self) -> ModelDescription:
        """Description of the model."""
        return self._description

    @property
    def module(self) -> Module:
        """The model in memory, to be measured on this thread while no row runs."""
        module: Module = self._model
        return module

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._parts.tokenizer

    @property
    def grammars(self) -> GrammarCompiler:
        """Compiler of grammars for the model's vocabulary."""
        return self._parts.grammars

    @property
    def media(self) -> MediaProcessor | None:
        """Decoder and processor of images and videos; None for a model that takes text only."""
        return self._parts.media.processor

    @property
    def adapters(self) -> AdapterRoom:
        """Adapters in memory."""
        return self._parts.adapter_room

    @property
    def inputs(self) -> None:
        """None: the model generates."""
        return

    def run(self, plan: StepPlan) -> StepResult:
        """Change blocks, release slots, prefill, decode, encode.

        Raises:
            StepMemoryError: The plan needs more memory than is left; nothing of it was done.
        """
        if plan.prefill or plan.decode:
            need = self._need_of(plan)
            self._memory.check(need)
            self._memory.begin()
            result = self._compute(plan)
            self._memory.end(need, has_decoded=bool(result.tokens))
        else:
            result = self._compute(plan)
        if not plan.encode:
            return result
        outcome = self._parts.media.encode(plan.encode, plan.encode_s)
        return replace(
            result,
            faults=(*result.faults, *outcome.faults),
            encoded=outcome.encoded,
            encoding_s=outcome.duration_s,
        )

    def _compute(self, plan: StepPlan) -> StepResult:
        blocks = self._blocks.apply(plan.blocks, self._cached_row)
        self._release(plan.release)
        plan_rows = {row.slot_index: row for row in plan.decode}
        decoders = self._decoders_of(plan_rows)
        decode = partial(self._batch.decode, plan_rows, plan.span_cost)
        # Prompts run first, and their pass may be that of the batch's rows: a packed pass.
        prompts = self._prefills.run(plan.prefill, decode if decoders == [self._batch] else None)
        decoded = prompts.result
        joined = self._join_lanes(prompts.whole, decoded.faults)
        if not prompts.has_decoded:
            for decoder in decoders or self._lanes_of_only(joined):
                decoded.add(decoder.decode(plan_rows, plan.span_cost))
        decoded.faults = self._explained(decoded.faults)
        failed = {fault.slot_index for fault in decoded.faults}
        self._blocks.forget_rows(failed)
        self._free_unused(blocks.dropped_bytes)
        return StepResult(
            (*[one for one in prompts.outputs if one.slot_index not in failed], *decoded.tokens),
            tuple(decoded.faults),
            blocks.held,
            blocks.lost,
            blocks.unsaved,
            tuple(decoded.drafts),
            tuple(decoded.draft_faults),
            decoded.span_tokens,
        )

    def memory(self) -> MemoryReading:
        """Return bytes at this moment.

        Raises:
            OSError: The system cannot tell.
        """
        return MemoryReading(
            kv_used_bytes=sum(decoder.kv_bytes for decoder in self._decoders)
            + self._prefills.kv_bytes
            + self._blocks.row_bytes,
            active_bytes=mx.get_active_memory(),
            peak_bytes=self._memory.peak_bytes,
            cache_bytes=mx.get_cache_memory(),
            available_bytes=available_memory_bytes(),
            step_bytes=self._memory.usable_bytes(computing_memory_bytes()),
            disk=self._blocks.reading(),
            experts=self._parts.experts.reading(),
            media=self._parts.media.reading(),
            adapters=self._parts.adapter_room.reading(),
        )

    def row_checksum(self) -> int:
        """Return a checksum of the rows: their slots, lengths and last tokens, in the order of their lanes."""
        rows = [one for decoder in self._decoders for one in decoder.row_states]
        return zlib.crc32(np.array(rows, dtype=np.int64).tobytes())

    def saved_blocks(self) -> tuple[SavedBlock, ...]:
        """Return the blocks of the disk tier."""
        return self._blocks.saved()

    def reset(self, *, max_rows: int | None = None) -> None:
        """Remove every row, and perhaps change how many there can be; blocks stay."""
        if max_rows is not None:
            self._max_rows = max_rows
        self._prefills.clear()
        for decoder in self._decoders:
            decoder.leave(decoder.slot_indices)
        self._serial.clear()
        self._blocks.forget_rows()
        self._parts.media.forget_rows()
        self._batch = self._decoder(self._parts.kv.batch_lane(self._max_rows))
        mx.clear_cache()

    def close(self) -> None:
        """Drop the weights and all blocks."""
        self.reset()
        self._blocks.close()
        if self._parts.proposer is not None:
            self._parts.proposer.close()
        self._parts.tokenizer.close()
        self._parts.experts.close()
        self._parts.media.close()
        self._parts.adapter_room.close()
        self._model = None
        del self._parts
        mx.clear_cache()

    @property
    def _decoders(self) -> list[Decoder]:
        return [self._batch, *self._serial.values()]

    def _decoders_of(self, slot_indices: Iterable[int]) -> list[Decoder]:
        """Return the decoders of these rows, each once."""
        decoders = [self._serial.get(slot_index, self._batch) for slot_index in slot_indices]
        return list(dict.fromkeys(decoders))

    def _lanes_of_only(self, joined: set[int]) -> list[Decoder]:
        """Return the lanes of rows that joined in this step; a plan of prefill alone must not decode older rows."""
        return [one for one in self._decoders_of(joined) if one.slot_indices <= joined]

    def _cached_row(self, slot_index: int) -> CachedRow | None:
        """Locate a slot's row, in prefill or in a lane; None if there is none."""
        prefilled = self._prefills.cached_row(slot_index)
        return prefilled or self._serial.get(slot_index, self._batch).cached_row(slot_index)

    def _release(self, slot_indices: Sequence[int]) -> None:
        for slot_index in slot_indices:
            if (decoder := self._serial.pop(slot_index, None)) is not None:
                decoder.leave((slot_index,))
        self._prefills.drop(slot_indices)
        self._blocks.forget_rows(slot_indices)
        self._parts.media.forget_rows(slot_indices)
        self._batch.leave(slot_indices)

    def _join_lanes(self, slot_indices: Sequence[int], faults: list[RowFault]) -> set[int]:
        """Move whole prompts into their lanes; returns the slots of those rows, and adds to ``faults``."""
        if not slot_indices:
            return set()
        begun = dict[int, tuple[Prefill, DecoderRow]]()
        for slot_index in slot_indices:
            prefill = self._prefills.pop(slot_index)
            if (row := self._begin(prefill, faults)) is not None:
                begun[slot_index] = prefill, row
        joining = self._parts.decider.agree_on_joining([*begun])
        for slot_index in joining:
            prefill, row = begun.pop(slot_index)  # nothing else holds its caches
            decoder = self._batch
            if prefill.first_chunk.lane is Lane.SERIAL:
                decoder = self._decoder(self._parts.kv.serial_lane())
                self._serial[slot_index] = decoder
            decoder.join(row, prefill.finish())
        return set(joining)

    def _begin(self, prefill: Prefill, faults: list[RowFault]) -> DecoderRow | None:
        """Return a whole prompt's row, or None if it cannot begin to decode: a fault of it."""
        first, vocabulary_tokens = prefill.first_chunk, self._description.vocabulary_tokens
        params, media = first.sampling, self._parts.media
        prompt_tokens = len(prefill.prompt) - first.resumed_tokens
        prompt, completion = prefill.prompt[:prompt_tokens], prefill.prompt[prompt_tokens:]
        if first.media:
            # Penalties and proposers know tokens, and an image has none of its own.
            prompt = [one for one in prompt if one < FIRST_MEDIA_KEY]
        try:
            matcher = self._parts.open_matcher(params)
            state = SamplingState.for_prompt(params, prompt, vocabulary_tokens, matcher)
            state = state.after(completion)
        except BaseException as cause:  # noqa: BLE001 - a row's fault, a panic in llguidance included
            faults.append(RowFault(first.slot_index, cause))
            return None
        row = DecoderRow(first.slot_index, state, first.reserved_tokens - prompt_tokens)
        if first.media:
            row.position_shift = media.shift(first.media)
            media.forget_rows((first.slot_index,))
        if (proposer := self._parts.proposer) is not None:
            row.proposals.begin(proposer, prompt, params, vocabulary_tokens)
            row.proposals.extend(completion)
        return row

    def _decoder(self, kv: LaneKv) -> Decoder:
        parts = self._parts
        passes = Passes(
            self._forward,
            kv,
            looks_ahead=parts.looks_ahead,
            packing=parts.packing,
            has_positions=parts.media.has_positions,
            choose_adapters=self._choose_adapters,
        )
        return Decoder(
            passes,
            kv,
            self._description.vocabulary_tokens,
            parts.masks,
            parts.decider,
            parts.keep_finished,
        )

    def _forward(
        self,
        token_ids: mx.array,
        caches: list[Cache],
        features: Mapping[str, mx.array] = NO_FEATURES,
    ) -> mx.array:
        logits: mx.array = self._model(token_ids, cache=caches, **features)
        return logits

    def _forward_or_raise(
        self, token_ids: mx.array, caches: list[Cache], features: Mapping[str, mx.array]
    ) -> mx.array:
        """Compute prompts' tokens; packed passes of rows do without, as no model with experts has them.

        Raises:
            OSError: An expert could not be read, so nothing that was computed may be kept.
        """
        logits = self._forward(token_ids, caches, features)
        if fault := self._parts.experts.take_fault():
            raise fault
        return logits

    def _choose_adapters(self, rows: Sequence[tuple[Adapter, ...]]) -> AbstractContextManager[None]:
        """Choose the adapters of a pass's rows; passes know the engine alone, so that it can drop the model."""
        return self._parts.row_adapters.chosen(rows)

    def _explained(self, faults: list[RowFault]) -> list[RowFault]:
        """Return the faults of a step, those of rows that lack an expert with that as their cause."""
        if (cause := self._parts.experts.take_fault()) is None:
            return faults
        return [
            replace(one, cause=cause) if isinstance(one.cause, FloatingPointError) else one
            for one in faults
        ]

    def _need_of(self, plan: StepPlan) -> StepNeed:
        """Return an upper bound of what a plan computes and allocates."""
        bytes_per_token = self._description.cache.bytes_per_token
        kv_tokens, joining = 0, list[JoiningRow]()
        for chunk in plan.prefill:
            reused_tokens = len(chunk.reused.token_ids) if chunk.reused is not None else 0
            # A prompt's own caches grow with its first chunk, or by COLUMN_STEP at a time, and each layer is copied to do so.
            kv_tokens += reused_tokens + chunk.opened_tokens + COLUMN_STEP
            if chunk.is_last and chunk.lane is Lane.BATCH:
                length = chunk.start + len(chunk.token_ids)
                joining.append(JoiningRow(length, chunk.reserved_tokens, chunk.shared))
        decoding = frozenset(row.slot_index for row in plan.decode)
        decoders = [one for one in self._decoders if one.slot_indices & decoding]
        draft_tokens = max((row.max_draft_tokens for row in plan.decode), default=0)
        joining_bytes = 0
        if joining:
            joining_bytes = self._batch.growth_bytes(joining, draft_tokens, bytes_per_token)
            decoders = [one for one in decoders if one is not self._batch]
        kv_bytes = kv_tokens * bytes_per_token + sum(
            one.growth_bytes((), draft_tokens, bytes_per_token) for one in decoders
        )
        rows = len(decoding) + len(joining)
        scoring = scoring_bytes(plan.prefill, self._description.vocabulary_tokens)
        return StepNeed(plan.prefill_tokens, rows, kv_bytes, joining_bytes, scoring)

    def _free_unused(self, dropped_bytes: int) -> None:
        """Give back memory that mlx keeps for reuse, once blocks were dropped or no row needs it."""
        self._dropped_bytes += dropped_bytes
        if self._dropped_bytes > _DROPPED_BYTES:
            self._dropped_bytes = 0
            give_memory_back()
        elif not (self._prefills or self._serial or self._batch.slot_indices):
            mx.clear_cache()

    def _warm_up(self) -> None:
        """Compute what only a first run costs, so that no request waits for it."""
        whole = PrefillChunk(
            slot_index=0,
            token_ids=(0,) * _WARM_UP_TOKENS,
            start=0,
            is_last=True,
            sampling=SamplingParams(temperature=0.0),
            reserved_tokens=_WARM_UP_TOKENS + 1,
            lane=Lane.SERIAL,
        )
        self.run(StepPlan(prefill=(whole,)))
        self.run(StepPlan(release=(0,)))
        self._memory.forget_peak()
