"""Rows with different adapters, and none, in one batch, compared with what the merged weights say alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

from machd.engine.adapters.low_rank import AdapterWeights
from machd.engine.protocol.step import SampledToken
from machd.engine.step.mlx_engine import MlxEngine
from machd.engine.step.ports import Proposer
from machd.request.adapter import Adapter
from machd_probes.merged_adapters import random_adapter
from machd_probes.play import GREEDY, DraftSchedule, Join, no_drafts, play
from machd_probes.scripts import random_prompt
from support.engines.adapters import TinyBase, adapted_engine, adapter_named
from support.engines.parity import Alone, differences
from support.engines.same_bits import bits, said

NARROW, WIDE = adapter_named("narrow"), adapter_named("wide", scale=0.8)
"""Adapters of rank 4 and 7."""

_TOKENS = 6
_ALL = 1 << 20


@dataclass(frozen=True)
class AdaptedRows:
    """A tiny model with two adapters of different rank on all linear layers.

    Attributes:
        has_magnitudes: The narrow one is of DoRA.
        looks_ahead: Each pass is dispatched before the last one's tokens are read.
    """

    base: TinyBase
    has_magnitudes: bool = False
    looks_ahead: bool = False

    @cached_property
    def weights(self) -> dict[Adapter, AdapterWeights]:
        """The adapters."""
        _, model = adapted_engine(self.base.loaded())
        narrow = random_adapter(
            model.base, rank=4, seed=1, scale=1.5, has_magnitudes=self.has_magnitudes
        )
        return {NARROW: narrow, WIDE: random_adapter(model.base, rank=7, seed=2, scale=0.5)}

    @cached_property
    def _alone(self) -> dict[Adapter, Alone]:
        """Of each adapter, rows alone with its merged weights."""
        return {
            adapter: Alone(partial(self._merged_engine, adapter, weights))
            for adapter, weights in self.weights.items()
        }

    def _merged_engine(self, adapter: Adapter, weights: AdapterWeights) -> MlxEngine:
        return adapted_engine(self.base.loaded((adapter, weights)))[0]

    def engine(self, proposer: Proposer | None = None) -> MlxEngine:
        """Make an engine with both adapters in memory."""
        adapters: dict[tuple[Adapter, ...], list[AdapterWeights]] = {
            (adapter,): [weights] for adapter, weights in self.weights.items()
        }
        return adapted_engine(
            self.base.loaded(), adapters, looks_ahead=self.looks_ahead, proposer=proposer
        )[0]

    def plain_engine(self) -> MlxEngine:
        """Make an engine that has never had an adapter."""
        return adapted_engine(self.base.loaded(), looks_ahead=self.looks_ahead)[0]

    def faults(
        self, engine: MlxEngine, rows: Sequence[Join], drafts: DraftSchedule = no_drafts
    ) -> list[str]:
        """Return where rows with adapters say something else than the merged weights, but for noise."""
        return self._faults(rows, play(engine, rows, drafts=drafts))

    def base_faults(self, engine: MlxEngine, rows: Sequence[Join]) -> list[int]:
        """Return which rows of the base model have other bits than in an engine without adapters."""
        return self._base_faults(rows, play(engine, rows))

    def all_faults(self, engine: MlxEngine, rows: Sequence[Join]) -> tuple[list[str], list[int]]:
        """Return both, of one play."""
        together = play(engine, rows)
        return self._faults(rows, together), self._base_faults(rows, together)

    def _faults(self, rows: Sequence[Join], together: list[list[SampledToken]]) -> list[str]:
        return [
            f"row {number}, {row.sampling.adapters}: {fault}"
            for number, (row, tokens) in enumerate(zip(rows, together, strict=True))
            for fault in self._faults_of(row, tokens)
        ]

    def _base_faults(self, rows: Sequence[Join], together: list[list[SampledToken]]) -> list[int]:
        expected = said(self.plain_engine(), [without_adapters(row) for row in rows])
        return [
            number
            for number, (row, tokens, own) in enumerate(zip(rows, together, expected, strict=True))
            if not row.sampling.adapters and bits(tokens) != own
        ]

    def _faults_of(self, row: Join, tokens: list[SampledToken]) -> list[str]:
        if not row.sampling.adapters:
            return []
        (adapter,) = row.sampling.adapters
        plain = without_adapters(row)
        return differences(self._alone[adapter].tokens(plain), tokens, plain.sampling)


def mixed_rows(
    chunk_tokens: int = _ALL, tokens: int = _TOKENS, keys: Sequence[Adapter | None] | None = None
) -> list[Join]:
    """Return rows that join in two waves: prompts of like length, of each adapter and of none."""
    adapters = keys or (None, NARROW, WIDE, NARROW, None, WIDE, NARROW, None)
    return [
        Join(
            random_prompt(9 + 4 * number, number),
            tokens,
            replace(GREEDY, top_logprobs=2, adapters=() if adapter is None else (adapter,)),
            at_step=3 * (number // 5),
            chunk_tokens=chunk_tokens,
        )
        for number, adapter in enumerate(adapters)
    ]


def without_adapters(row: Join) -> Join:
    """Return the same row of the base model."""
    return replace(row, sampling=replace(row.sampling, adapters=()))
