"""Batched drafts that are right but slower are left off, and the verdict tells the figure."""

from __future__ import annotations

import pytest

from machd.capabilities.bitwise import BitwiseVerdict
from machd.capabilities.evidence import Outcome, ProbeResult
from machd.capabilities.facts import CacheFacts, LayerCacheFacts
from machd.capabilities.verdict import Support
from machd.capabilities.verdicts import judge
from machd.capabilities.versions import Versions
from machd.dialects.inspection import _with_gain
from machd.engine.protocol.step import ProposerKind
from machd.link.speculation_mode import SpeculationDecision
from machd.scheduler.draft_reading import DraftReading
from machd.served.capabilities import ModelCapabilities, SpeculationReport, wire_capabilities

STATE = LayerCacheFacts("ArraysCache", owner="GatedDeltaNet", trimmable=False)


def _row(outcome: Outcome = Outcome.PASSED) -> ModelCapabilities:
    facts = CacheFacts((STATE, LayerCacheFacts("KVCache")), 1, 1)
    versions = Versions(machd="1", mlx="2", mlx_lm="3")
    verdicts = judge(facts, [ProbeResult("batched_drafts", outcome)])
    bitwise = BitwiseVerdict(value=False, reason="not measured yet")
    return wire_capabilities("qwen3_5_moe", facts, verdicts, versions, bitwise=bitwise)


def _decision(active: ProposerKind = ProposerKind.DFLASH) -> SpeculationDecision:
    return SpeculationDecision("auto", active, "why", 8)


@pytest.mark.parametrize(
    ("gain", "words"), [(0.62, "off because slower"), (1.08, "off because slower"), (1.4, "; on: ")]
)
def test_figure_is_part_of_the_verdict(gain: float, words: str) -> None:
    """Supported all the same, in both places where it is told."""
    row = _with_gain(_row(), _decision(), DraftReading(batched_gain=gain))

    verdict = row.batched_specdec
    assert verdict is not None
    assert verdict.support is Support.SUPPORTED
    assert words in verdict.reason
    assert f"{gain:.2f} times" in verdict.reason
    assert isinstance(row.speculation, SpeculationReport)
    assert row.speculation.batched_specdec == verdict


@pytest.mark.parametrize(
    ("row", "decision", "reading"),
    [
        (_row(), _decision(), DraftReading()),
        (_row(), _decision(ProposerKind.OFF), DraftReading(batched_gain=0.5)),
        (_row(Outcome.FAILED), _decision(), DraftReading(batched_gain=0.5)),
    ],
    ids=["not asked yet", "no proposer", "blocked"],
)
def test_figure_is_absent_without_drafts(
    row: ModelCapabilities, decision: SpeculationDecision, reading: DraftReading
) -> None:
    """The verdict is as it was."""
    assert _with_gain(row, decision, reading) == row
