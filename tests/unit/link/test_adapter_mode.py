"""The decision on adapters: in a batch where that is known to be right, refused where it is known to be wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.engines.fake_engine import FakeEngine

from machd.capabilities.evidence import Evidence, Outcome, ProbeResult
from machd.capabilities.verdict import Support, Verdict
from machd.link.adapter_mode import adapter_policy
from machd.link.state import ServedState


@pytest.mark.parametrize("support", Support)
def test_adapter_policy_follows_the_verdict(support: Support) -> None:
    """Unknown rows run alone, and only a blocked verdict refuses them, with its own reason."""
    policy = adapter_policy(Verdict(support, "they were seen to be wrong"))

    assert policy.is_batched == (support is Support.SUPPORTED)
    assert bool(policy.refusal) == (support is Support.BLOCKED)
    assert "they were seen to be wrong" in (policy.refusal or "they were seen to be wrong")


def test_obstacle_of_a_loaded_model_blocks_whatever_was_measured() -> None:
    """The verdict of a model whose experts are on disk promises no adapters that the engine would refuse."""
    model = FakeEngine().model
    passed = (ProbeResult("adapters", Outcome.PASSED, "", Evidence(0, 0.0, 0.0, 8)),)
    assert ServedState.of(model, passed).verdicts.batched_adapters.support is Support.SUPPORTED

    hindered = replace(model, adapter_obstacle="its experts are on disk")
    verdict = ServedState.of(hindered, passed).verdicts.batched_adapters

    assert (verdict.support, verdict.reason) == (Support.BLOCKED, "its experts are on disk")
