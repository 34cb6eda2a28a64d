"""Faults to plant around the rows of a batch: samplers, prompts, snapshots and left-out mends."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest

from machd.engine import assembly
from machd.engine.backend.untyped import Cache
from machd.engine.kernels import batchable, packed
from machd.engine.kv.lane_kv import PrefilledRow
from machd.engine.sampling import gumbel_noise
from machd.engine.sampling.sampler import Sampler, Selection
from machd.engine.sampling.sampling_state import SamplingState
from machd.engine.step import decoder
from machd.engine.step.decoder import Decoder
from machd.engine.step.prompts import strategies
from machd.engine.step.prompts.prefill import Prefill
from machd.engine.step.row import DecoderRow
from machd.request.generation import SamplingParams
from machd_probes import passes
from support.engines.faults_in_caches import Plant

from mlx_lm.models.cache import ArraysCache, CacheList, KVCache  # isort: skip - after the engine


def one_sampler_for_all(patch: pytest.MonkeyPatch) -> None:
    """Every row is sampled with the parameters and the state of the row in the first place."""

    class First(Sampler):
        def __init__(self, rows: Sequence[SamplingParams], *others: Any) -> None:
            super().__init__([rows[0]] * len(rows), *others)

        def sample(self, states: Sequence[SamplingState], logits: mx.array) -> Selection:
            return super().sample([states[0]] * len(states), logits)

    patch.setattr(decoder, "Sampler", First)


def one_generator_for_all(patch: pytest.MonkeyPatch) -> None:
    """A row's draw depends on how many draws there were, and its seed is ignored."""
    right, count = gumbel_noise.draw_key, [0]

    def draw(_seed: int, _position: int) -> tuple[int, int]:
        count[0] += 1
        return right(0, count[0])

    patch.setattr(gumbel_noise, "draw_key", draw)


def a_moved_rows_history_stays(patch: pytest.MonkeyPatch) -> None:
    """A row that moves to another place loses what its penalties have counted."""
    right = Decoder.remove

    def remove(self: Decoder, rows: Collection[DecoderRow]) -> None:
        before = list(self._rows)
        right(self, rows)
        for row, former in zip(self._rows, before, strict=False):
            if row is not former and row.sampling.counts is not None:
                nothing = mx.zeros_like(row.sampling.counts)
                row.sampling = replace(row.sampling, counts=nothing)

    patch.setattr(Decoder, "remove", remove)


def a_slots_history_stays(patch: pytest.MonkeyPatch) -> None:
    """A row's penalties count the tokens of the row that had its slot before."""
    right, known = Decoder.join, dict[int, DecoderRow]()

    def join(self: Decoder, row: DecoderRow, prefilled: PrefilledRow) -> None:
        former = known.get(row.slot_index)
        if former is not None and row.sampling.counts is not None:
            counts = former.sampling.counts
            row.sampling = row.sampling if counts is None else replace(row.sampling, counts=counts)
        known[row.slot_index] = row
        right(self, row, prefilled)

    patch.setattr(Decoder, "join", join)


def a_chunk_loses_its_last_token(patch: pytest.MonkeyPatch) -> None:
    """The last token of each chunk but the final one is not computed."""
    right = Prefill.append

    def append(self: Prefill) -> tuple[int, ...]:
        token_ids = right(self)
        return token_ids if self.chunk.is_last else token_ids[:-1]

    patch.setattr(Prefill, "append", append)


def a_chunk_beside_rows_begins_anew(patch: pytest.MonkeyPatch) -> None:
    """Prompt tokens in a step of others stand where the prompt begins."""
    right = packed.packed_caches

    def packed_caches(rows: Any, prompts: Any) -> Any:
        caches = right(rows, prompts)
        chunks = [mx.arange(tokens, dtype=mx.int32) for _, tokens in prompts]
        decoding = len(caches[0].offset) - sum(tokens for _, tokens in prompts)
        for cache in caches:
            cache.offset = mx.concatenate([caches[0].offset[:decoding], *chunks])
            cache.prompts = [one._replace(start=mx.zeros_like(one.start)) for one in cache.prompts]
        return caches

    patch.setattr(assembly, "packed_caches", packed_caches)


def padding_is_remembered(patch: pytest.MonkeyPatch) -> None:
    """Prompts of unequal length are computed together, padded at their ends, states and all."""

    def can_share(_: strategies.Padded, prefill: Prefill) -> bool:
        chunk = prefill.chunk
        return chunk.start == 0 and chunk.is_last and len(chunk.token_ids) > 1

    def share(this: strategies.Padded, prefills: Sequence[Prefill]) -> bool:
        prompts = [prefill.first_chunk.token_ids[:-1] for prefill in prefills]
        longest = max(map(len, prompts))
        padded = [[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts]
        caches = list(prefills[0].caches)
        this.forward(mx.array(padded, dtype=mx.int32), caches, {})
        for row, (prefill, prompt) in enumerate(zip(prefills, prompts, strict=True)):
            prefill.adopt([_of_row(cache, row, len(prompt)) for cache in caches], 0)
        return True

    patch.setattr(strategies.Padded, "_can_pad", can_share)
    patch.setattr(strategies.Padded, "_compute_group", share)


def _of_row(cache: Cache, row: int, length: int) -> Cache:
    if isinstance(cache, CacheList):
        return CacheList(*(_of_row(inner, row, length) for inner in cache.caches))
    if isinstance(cache, ArraysCache):
        state: Cache = cache.extract(row)
        return state
    keys, values = (array[row : row + 1, :, :length] for array in (cache.keys, cache.values))
    kept: Cache = KVCache.from_state((keys, values, length))
    return kept


def a_finished_prompt_is_held(patch: pytest.MonkeyPatch) -> None:
    """A reference keeps every prompt's caches alive."""
    right, held = Prefill.finish, list[PrefilledRow]()

    def finish(self: Prefill) -> PrefilledRow:
        held.append(right(self))
        return held[-1]

    patch.setattr(Prefill, "finish", finish)


def snapshots_share_their_arrays(patch: pytest.MonkeyPatch) -> None:
    """State copied out of a cache changes with the cache."""
    patch.setattr(passes, "_copied", lambda state: state)


def unmended(architecture: str, layer: str) -> Plant:
    """Layers of this class stay as mlx-lm has them."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        patch.delitem(batchable._MENDED, (architecture, layer))

    plant.__name__ = f"{architecture}_{layer}_is_not_mended"
    return plant
