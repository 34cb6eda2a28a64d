"""The decision on the decode mode: batched only where it was asked for and is known to be right."""

from __future__ import annotations

import pytest

from machd.capabilities.verdict import Support, Verdict
from machd.link.decode_mode import decide_decode_mode
from machd.scheduler.events import DecodeMode


@pytest.mark.parametrize("support", Support)
def test_nobody_gets_a_batch_without_asking(support: Support) -> None:
    """Whatever the rule says, the default is one generation at a time, and how to change it."""
    decision = decide_decode_mode(is_batching_asked=False, verdict=Verdict(support, "why"))

    assert decision.requested is decision.active is DecodeMode.SINGLE
    assert decision.is_as_requested
    assert "continuous_batching.enabled" in decision.reason


@pytest.mark.parametrize("support", Support)
def test_a_batch_needs_the_verdict(support: Support) -> None:
    """Blocked and unknown both mean single, with the rule's own reason, and never an exception."""
    decision = decide_decode_mode(is_batching_asked=True, verdict=Verdict(support, "why"))

    assert decision.requested is DecodeMode.BATCHED
    assert decision.reason == "why"
    assert decision.is_as_requested == (support is Support.SUPPORTED)
    assert decision.active is (
        DecodeMode.BATCHED if support is Support.SUPPORTED else DecodeMode.SINGLE
    )
