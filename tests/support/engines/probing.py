"""The real checks on a tiny model, as the prober runs them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import mlx.core as mx

from machd.capabilities.evidence import ProbeResult
from machd.capabilities.facts import CacheFacts
from machd.clock import SystemClock
from machd_probes import prober


@dataclass(frozen=True)
class Probed:
    """The prompts of a tiny model, and its caches."""

    facts: CacheFacts
    results: tuple[ProbeResult, ...]


def probed(variant: str, checks: Sequence[str]) -> Probed:
    """Run these checks on a tiny model that is built anew."""
    subject = prober.tiny_subject(variant)
    try:
        clock = SystemClock()
        results = tuple(prober.run_check(subject, check, clock) for check in checks)
    finally:
        subject.engine.close()
        mx.clear_cache()
    return Probed(subject.description.cache, results)


@contextmanager
def without_compilation() -> Iterator[None]:
    """As in the daemon and in the prober's workers on a CPU; other tests trace models."""
    mx.disable_compile()
    try:
        yield
    finally:
        mx.enable_compile()
