"""The engine on MLX: rows of a loaded model, computed one after another."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from machd.engine.decoder import RowDecoder, RowFailure
from machd.engine.loader import LoadedModel
from machd.engine.protocol import (
    DecodeRow,
    MemoryReading,
    ModelDescription,
    PrefillChunk,
    RowFault,
    SampledToken,
    SamplingParams,
    StepPlan,
    StepResult,
    Tokenizer,
)

__all__ = ["MlxEngine"]

_WARM_UP_TOKENS = 24
"""Longer than the decoder's head split, so that both shapes of prefill are compiled."""


class MlxEngine:
    """A model in memory. Made, used and closed on one thread."""

    def __init__(self, loaded: LoadedModel) -> None:
        """Take over a loaded model and compile what a first request would wait for."""
        self._loaded: LoadedModel | None = loaded
        self._model: Any = loaded.model
        self._description = loaded.description
        self._tokenizer = loaded.tokenizer
        self._rows: dict[int, RowDecoder] = {}
        self._warm_up()

    @property
    def model(self) -> ModelDescription:
        """What is loaded."""
        return self._description

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._tokenizer

    def run(self, plan: StepPlan) -> StepResult:
        """Free, prefill, decode. A row's sampler may fail alone; the forward pass may not."""
        for slot_index in plan.release:
            self._rows.pop(slot_index, None)
        tokens: list[SampledToken] = []
        faults: list[RowFault] = []
        parts: tuple[PrefillChunk | DecodeRow, ...] = (*plan.prefill, *plan.decode)
        for work in parts:
            try:
                token = (
                    self._prefill(work) if isinstance(work, PrefillChunk) else self._decode(work)
                )
            except RowFailure as failure:
                faults.append(RowFault(work.slot_index, _cause(failure)))
            else:
                tokens.extend([token] if token is not None else [])
        if not self._rows:
            mx.clear_cache()
        return StepResult(tuple(tokens), tuple(faults))

    def memory(self) -> MemoryReading:
        """Bytes right now."""
        return MemoryReading(
            kv_used_bytes=sum(row.kv_bytes for row in self._rows.values()),
            active_bytes=mx.get_active_memory(),
            peak_bytes=mx.get_peak_memory(),
            cache_bytes=mx.get_cache_memory(),
        )

    def reset(self) -> None:
        """Forget every row."""
        self._rows.clear()
        mx.clear_cache()

    def close(self) -> None:
        """Drop the weights."""
        self.reset()
        self._model = None
        self._loaded = None
        mx.clear_cache()

    def _prefill(self, chunk: PrefillChunk) -> SampledToken | None:
        if chunk.start == 0:
            assert chunk.slot_index not in self._rows, "a slot is freed before it is taken again"
            self._rows[chunk.slot_index] = RowDecoder(
                self._forward,
                make_prompt_cache(self._model),
                chunk,
                self._description.vocabulary_tokens,
            )
        return self._rows[chunk.slot_index].prefill(chunk)

    def _decode(self, row: DecodeRow) -> SampledToken:
        return self._rows[row.slot_index].decode(has_next=row.has_next)

    def _forward(self, token_ids: mx.array, caches: list[Any]) -> mx.array:
        logits: mx.array = self._model(token_ids, cache=caches)
        return logits

    def _warm_up(self) -> None:
        """Compile prefill and decode on a row that nobody asked for."""
        sampling = SamplingParams(temperature=0.0)
        chunk = PrefillChunk(
            slot_index=0,
            token_ids=(0,) * _WARM_UP_TOKENS,
            start=0,
            is_last=True,
            sampling=sampling,
            reserved_tokens=_WARM_UP_TOKENS + 2,
        )
        self.run(StepPlan(prefill=(chunk,)))
        self.run(StepPlan(decode=(DecodeRow(0, has_next=False),)))
        self.run(StepPlan(release=(0,)))
        mx.reset_peak_memory()


def _cause(failure: RowFailure) -> Exception:
    cause = failure.__cause__
    assert isinstance(cause, Exception), "a row failure is always raised from its cause"
    return cause
