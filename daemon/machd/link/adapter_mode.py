"""Adapters in force: whether rows with adapters share a batch, are computed alone, or are refused.

A pure function, called by the scheduler and by the check of a request, so that neither takes what the other refuses.
"""

from __future__ import annotations

from machd.capabilities.verdict import Support, Verdict
from machd.scheduler.config import AdapterPolicy


def adapter_policy(verdict: Verdict) -> AdapterPolicy:
    """Let rows with adapters share a batch only where that is known to be right; refuse them where it is known to be wrong."""
    if verdict.support is Support.BLOCKED:
        return AdapterPolicy(
            is_batched=False, refusal=f"no adapter is served with this model: {verdict.reason}"
        )
    return AdapterPolicy(is_batched=verdict.support is Support.SUPPORTED)
