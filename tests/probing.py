"""The real checks on a tiny model, as the prober runs them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import mlx.core as mx

from machd.capabilities.evidence import ProbeResult
from machd.clock import SystemClock
from machd_probes import prober

__all__ = ["checked", "without_compilation"]


def checked(variant: str, checks: Sequence[str]) -> dict[str, ProbeResult]:
    """What each of these checks says of a tiny model, built anew."""
    subject = prober.tiny_subject(variant)
    try:
        results = prober._run(subject, checks, SystemClock())
    finally:
        subject.engine.close()
        mx.clear_cache()
    return {result.probe: result for result in results}


@contextmanager
def without_compilation() -> Iterator[None]:
    """As in the daemon and in the prober's workers on a CPU; other tests trace models."""
    mx.disable_compile()
    try:
        yield
    finally:
        mx.enable_compile()
