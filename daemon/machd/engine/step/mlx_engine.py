"""The engine on MLX: prompts into caches, rows into lanes, one pass a lane and step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module

from machd.capabilities.facts import KvCacheKind
from machd.engine.backend.device import (
    available_memory_bytes,
    computing_memory_bytes,
    give_memory_back,
)
from machd.engine.backend.untyped import Cache
from machd.engine.kv.batch_lane import BatchLaneKv
from machd.engine.kv.kv_format import KvFormat
from machd.engine.kv.lane_kv import STEP_TOKENS, LaneKv, SerialLaneKv
from machd.engine.kv.row_caches import CachedRow, make_row_caches
from machd.engine.protocol.blocks import SavedBlock
from machd.engine.protocol.engine import GrammarCompiler, MemoryReading, ModelDescription
from machd.engine.protocol.sampling import SamplingParams
from machd.engine.protocol.step import (
    Lane,
    PrefillChunk,
    PromptLogprob,
    RowFault,
    StepPlan,
    StepResult,
)
from machd.engine.protocol.tokenizer import Tokenizer
from machd.engine.step.decode_pass import Chunk, PackCaches, Passes
from machd.engine.step.decoder import Decoder
from machd.engine.step.decoder_row import Decoded, DecoderRow
from machd.engine.step.look_ahead import LookAheadDecoder
from machd.engine.step.memory import StepMemory, StepNeed
from machd.engine.step.ports import BlockTier, Masks, Matcher, Proposer
from machd.engine.step.prefill import Prefill, fill_together, padded_groups
from machd.engine.step.prompt_scores import scoring_bytes
from machd.engine.step.proposals import RowProposals
from machd.engine.step.sampling import RowSampling

_WARM_UP_TOKENS = 8

_DROPPED_BYTES = 64_000_000
"""So much of blocks that are dropped may be kept for reuse while rows run."""


@dataclass(frozen=True, slots=True)
class EngineParts:
    """Parts of an engine, made by :func:`machd.engine.assembly.engine_parts`.

    Attributes:
        model: mlx-lm's module.
        kv_format: Format of the rows' keys and values.
        grammars: Compiler of the model's grammars.
        open_matcher: Returns a fresh matcher; None for parameters that allow every token.
        masks: Fills the masks of matchers.
        blocks: Blocks of the prefix cache.
        keeps_left_rows: True if blocks may be stored of rows that have left with their last token.
        memory: Memory that steps take.
        proposer: Source of draft tokens; None for none.
        looks_ahead: Dispatch each pass before the last one's tokens are read.
        pack: Caches of a pass that computes rows and prompt tokens together; None where the model's
            layers cannot.
    """

    model: Any
    description: ModelDescription
    tokenizer: Tokenizer
    kv_format: KvFormat
    grammars: GrammarCompiler
    open_matcher: Callable[[SamplingParams], Matcher | None]
    masks: Masks
    blocks: BlockTier
    keeps_left_rows: bool
    memory: StepMemory
    proposer: Proposer | None
    looks_ahead: bool
    pack: PackCaches | None


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
        self._prefills: dict[int, Prefill] = {}
        self._blocks = parts.blocks
        self._dropped_bytes = 0
        self._batch = self._decoder(BatchLaneKv(max_rows))
        self._serial: dict[int, Decoder] = {}
        self._memory = parts.memory
        self._warm_up()

    @property
    def model(self) -> ModelDescription:
        """What is loaded."""
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
        """What compiles for the model's vocabulary."""
        return self._parts.grammars

    def run(self, plan: StepPlan) -> StepResult:
        """Change blocks, free, prefill, decode. A row's sampler may fail alone, a pass may not.

        Raises:
            StepMemoryError: There is too little memory left for what the plan computes.
        """
        if not (plan.prefill or plan.decode):
            return self._run(plan)
        need = self._need_of(plan)
        self._memory.check(need)
        self._memory.begin()
        result = self._run(plan)
        self._memory.end(need, has_decoded=bool(result.tokens))
        return result

    def _need_of(self, plan: StepPlan) -> StepNeed:
        """What a plan computes, and how much of caches that allocates at most."""
        bytes_per_token = self._description.cache.bytes_per_token
        kv_tokens, joining = 0, list[tuple[int, int]]()
        for chunk in plan.prefill:
            reused_tokens = len(chunk.reused.token_ids) if chunk.reused is not None else 0
            # Caches of its own grow by whole steps; one layer at a time is copied for it.
            kv_tokens += reused_tokens + len(chunk.token_ids) + STEP_TOKENS
            if chunk.is_last and chunk.lane is Lane.BATCH:
                joining.append((chunk.start + len(chunk.token_ids), chunk.reserved_tokens))
        decoding = frozenset(row.slot_index for row in plan.decode)
        lanes = [lane for lane in self._every_lane if lane.slot_indices & decoding]
        draft_tokens = max((row.max_draft_tokens for row in plan.decode), default=0)
        joining_bytes = 0
        if joining:
            joining_bytes = self._batch.growth_bytes(joining, draft_tokens, bytes_per_token)
            lanes = [lane for lane in lanes if lane is not self._batch]
        kv_bytes = kv_tokens * bytes_per_token + sum(
            lane.growth_bytes((), draft_tokens, bytes_per_token) for lane in lanes
        )
        rows = len(decoding) + len(joining)
        scored = [len(one.token_ids) for one in plan.prefill if _is_scored(one)]
        scoring = scoring_bytes(max(scored, default=0), self._description.vocabulary_tokens)
        return StepNeed(plan.prefill_tokens, rows, kv_bytes, joining_bytes, scoring)

    def _run(self, plan: StepPlan) -> StepResult:
        blocks = self._blocks.apply(plan.blocks, self._cached_row)
        self._release(plan.release)
        step = Decoded()
        prompt_logprobs: list[PromptLogprob] = []
        asked = {row.slot_index: row for row in plan.decode}
        turns = self._lanes(asked)
        if self._parts.pack is not None and turns == [self._batch] and self._is_mixable(plan):
            self._mix(plan, step)
            turns = []
        else:
            newcomers = self._prefill(plan.prefill, step.faults, prompt_logprobs)
            if not turns:
                # Newcomers share the turn of their lane, or have one of their own in an empty one.
                lanes = self._lanes(newcomers)
                turns = [lane for lane in lanes if lane.slot_indices <= set(newcomers)]
        for lane in turns:
            step.add(lane.decode(asked, plan.span_cost))
        self._blocks.forget_rows(fault.slot_index for fault in step.faults)
        self._give_back(blocks.dropped_bytes)
        return StepResult(
            tuple(step.tokens),
            tuple(step.faults),
            blocks.held,
            blocks.lost,
            blocks.unsaved,
            tuple(step.drafts),
            tuple(step.draft_faults),
            step.span_tokens,
            tuple(prompt_logprobs),
        )

    def memory(self) -> MemoryReading:
        """Bytes right now.

        Raises:
            OSError: The system cannot tell.
        """
        step_bytes = self._memory.left_of(computing_memory_bytes())
        return MemoryReading(
            kv_used_bytes=sum(lane.kv_bytes for lane in self._every_lane)
            + sum(prefill.kv_bytes for prefill in self._prefills.values())
            + self._blocks.row_bytes,
            active_bytes=mx.get_active_memory(),
            peak_bytes=self._memory.peak_bytes,
            cache_bytes=mx.get_cache_memory(),
            available_bytes=available_memory_bytes(),
            step_bytes=step_bytes,
            disk=self._blocks.reading(),
        )

    def saved_blocks(self) -> tuple[SavedBlock, ...]:
        """The blocks that the disk tier has."""
        return self._blocks.saved()

    def reset(self, *, max_rows: int | None = None) -> None:
        """Forget every row, and perhaps how many there can be; blocks stay."""
        if max_rows is not None:
            self._max_rows = max_rows
        self._prefills.clear()
        for lane in self._every_lane:
            lane.close()
        self._serial.clear()
        self._blocks.forget_rows()
        self._batch = self._decoder(BatchLaneKv(self._max_rows))
        mx.clear_cache()

    def close(self) -> None:
        """Drop the weights and all blocks."""
        self.reset()
        self._blocks.close()
        if self._parts.proposer is not None:
            self._parts.proposer.close()
        self._parts.tokenizer.close()
        self._model = None
        del self._parts
        mx.clear_cache()

    @property
    def _every_lane(self) -> list[Decoder]:
        return [self._batch, *self._serial.values()]

    @property
    def _is_idle(self) -> bool:
        return not (self._prefills or self._serial or self._batch.slot_indices)

    def _give_back(self, dropped_bytes: int) -> None:
        """Let go of what mlx keeps for reuse, where no row needs it or blocks were dropped for it."""
        self._dropped_bytes += dropped_bytes
        if self._dropped_bytes > _DROPPED_BYTES:
            self._dropped_bytes = 0
            give_memory_back()
        elif self._is_idle:
            mx.clear_cache()

    def _release(self, slot_indices: Sequence[int]) -> None:
        for slot_index in slot_indices:
            self._prefills.pop(slot_index, None)
            if (lane := self._serial.pop(slot_index, None)) is not None:
                lane.close()
        self._blocks.forget_rows(slot_indices)
        self._batch.leave(slot_indices)

    def _cached_row(self, slot_index: int) -> CachedRow | None:
        """Find a slot's row, in prefill or in a lane; None if there is none."""
        if slot_index in self._prefills:
            return self._prefills[slot_index].cached_row
        return self._serial.get(slot_index, self._batch).cached_row(slot_index)

    def _lanes(self, slot_indices: Iterable[int]) -> list[Decoder]:
        """The decoders of these rows, each once."""
        lanes = [self._serial.get(slot_index, self._batch) for slot_index in slot_indices]
        return list(dict.fromkeys(lanes))

    def _is_mixable(self, plan: StepPlan) -> bool:
        """Whether prompt tokens can go into the pass that decodes."""
        return len(plan.prefill) == 1 and not _is_scored(plan.prefill[0])

    def _mix(self, plan: StepPlan, step: Decoded) -> None:
        """Decode the batch and compute a chunk in one pass; its row joins for the next one."""
        (chunk,) = plan.prefill
        self._open(chunk)
        prefill = self._prefills[chunk.slot_index]
        token_ids = prefill.take(chunk)
        beside = Chunk(token_ids, prefill.caches) if token_ids else None
        step.add(self._batch.decode({}, plan.span_cost, beside))
        if beside is not None:
            prefill.wait()
        if chunk.is_last:
            self._seat(chunk.slot_index, step.faults)

    def _open(self, chunk: PrefillChunk) -> None:
        if chunk.opens:
            assert chunk.slot_index not in self._prefills, "a slot is freed before it is taken"
            caches = self._make_caches()
            if chunk.reused is not None:
                self._blocks.fill(caches, chunk.reused)
            vocabulary_tokens = self._description.vocabulary_tokens
            self._prefills[chunk.slot_index] = Prefill(chunk, caches, vocabulary_tokens)

    def _prefill(
        self,
        chunks: Sequence[PrefillChunk],
        faults: list[RowFault],
        prompt_logprobs: list[PromptLogprob],
    ) -> list[int]:
        """Compute chunks; returns the slots of the rows that decode now."""
        for chunk in chunks:
            self._open(chunk)
        whole = [self._prefills[one.slot_index] for one in chunks if self._can_share(one)]
        shared = [group for group in padded_groups(whole) if len(group) > 1]
        for group in shared:
            fill_together(
                self._forward, group, len(self._description.cache.layers), self._parts.kv_format
            )
        together = {prefill.opening.slot_index for group in shared for prefill in group}
        for chunk in chunks:
            if chunk.slot_index not in together:
                try:
                    prefill = self._prefills[chunk.slot_index]
                    prompt_logprobs += prefill.fill(self._forward, chunk)
                except FloatingPointError as cause:
                    faults.append(RowFault(chunk.slot_index, cause))
                    del self._prefills[chunk.slot_index]
        finished = [
            chunk.slot_index
            for chunk in chunks
            if chunk.is_last and chunk.slot_index in self._prefills
        ]
        return [slot_index for slot_index in finished if self._seat(slot_index, faults)]

    def _can_share(self, chunk: PrefillChunk) -> bool:
        """Whether a chunk is a whole prompt that padding at its end cannot change.

        Only attention with a standard cache is blind to what comes after a token. A row of the
        serial lane decodes in caches of its own, which one of several rows has not. The logits of
        several scored prompts together would take too much memory.
        """
        if (
            _is_scored(chunk)
            or chunk.lane is not Lane.BATCH
            or self._description.cache.kind is not KvCacheKind.STANDARD
        ):
            return False
        return chunk.start == 0 and chunk.is_last and len(chunk.token_ids) > 1

    def _seat(self, slot_index: int, faults: list[RowFault]) -> bool:
        """Move a whole prompt into its lane; returns whether its row decodes there now."""
        prefill = self._prefills.pop(slot_index)
        opening, vocabulary_tokens = prefill.opening, self._description.vocabulary_tokens
        try:
            sampling = RowSampling.for_prompt(
                opening.sampling,
                prefill.prompt,
                vocabulary_tokens,
                self._parts.open_matcher(opening.sampling),
            )
        except BaseException as cause:  # noqa: BLE001 - a row's fault, a panic in llguidance included
            faults.append(RowFault(slot_index, cause))
            return False
        lane = self._batch
        if opening.lane is Lane.SERIAL:
            lane = self._serial[slot_index] = self._decoder(SerialLaneKv())
        max_tokens = opening.reserved_tokens - len(prefill.prompt)
        row = DecoderRow(slot_index, sampling, max_tokens)
        if (proposer := self._parts.proposer) is not None:
            row.proposals = RowProposals(
                proposer, prefill.prompt, opening.sampling, vocabulary_tokens
            )
        lane.join(row, prefill.finish())
        return True

    def _make_caches(self) -> list[Cache]:
        return make_row_caches(self._model, self._parts.kv_format)

    def _decoder(self, caches: LaneKv) -> Decoder:
        parts, vocabulary_tokens = self._parts, self._description.vocabulary_tokens
        if not parts.looks_ahead:
            passes = Passes(self._forward, caches, pack=parts.pack)
            return Decoder(passes, caches, vocabulary_tokens, parts.masks)
        see_leaving = self._blocks.keep_row if parts.keeps_left_rows else None
        passes = Passes(self._forward, caches, is_eager=True)
        return LookAheadDecoder(passes, caches, vocabulary_tokens, parts.masks, see_leaving)

    def _forward(self, token_ids: mx.array, caches: list[Cache]) -> mx.array:
        logits: mx.array = self._model(token_ids, cache=caches)
        return logits

    def _warm_up(self) -> None:
        """Run once what a first request would wait for."""
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


def _is_scored(chunk: PrefillChunk) -> bool:
    """Whether log-probabilities of the prompt were asked for."""
    return chunk.sampling.prompt_logprobs is not None
