"""A fake engine that guesses two tokens ahead wherever it may, of which the first is right."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from machd.engine.fake import FakeEngine
from machd.engine.protocol import (
    DecodeRow,
    DraftFault,
    DraftOutcome,
    ModelDescription,
    ProposerKind,
    RowFault,
    SampledToken,
    StepPlan,
    StepResult,
)

__all__ = ["GuessingEngine"]

_GUESSES = 2


class GuessingEngine(FakeEngine):
    """Says what its script says, sooner."""

    def __init__(self, *arguments: Any, fails: bool = False, **options: Any) -> None:
        """Like a fake engine; with ``fails`` guessing fails for every row, once."""
        super().__init__(*arguments, **options)
        self._fails = fails
        self._failed: set[int] = set()
        self._drafts: list[DraftOutcome] = []
        self._draft_faults: list[DraftFault] = []

    @property
    def model(self) -> ModelDescription:
        """The same made-up model, with somebody who guesses."""
        return replace(
            super().model, proposer=ProposerKind.NGRAM, proposer_reason="speculation.mode is auto"
        )

    def run(self, plan: StepPlan) -> StepResult:
        """A step as ever, with what came of the guesses."""
        self._drafts, self._draft_faults = [], []
        self._failed -= {chunk.slot_index for chunk in plan.prefill if chunk.opens}
        result = super().run(plan)
        return replace(result, drafts=tuple(self._drafts), draft_faults=tuple(self._draft_faults))

    def _decode(self, decode: DecodeRow) -> list[SampledToken | RowFault]:
        tokens, row = super()._decode(decode), self._rows[decode.slot_index]
        if decode.max_draft_tokens < _GUESSES or row.guide is not None or row.room_tokens < 1:
            return tokens
        if decode.slot_index in self._failed:
            return tokens
        if self._fails:
            fault = DraftFault(decode.slot_index, RuntimeError("it was to fail"))
            self._draft_faults.append(fault)
            self._failed.add(decode.slot_index)
            return tokens
        self._drafts.append(DraftOutcome(decode.slot_index, _GUESSES, 1))
        return tokens + super()._decode(decode)
