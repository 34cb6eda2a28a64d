"""The real checks on a tiny model, as the prober runs them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import mlx.core as mx

from machd.capabilities.evidence import ProbeResult
from machd.capabilities.facts import CacheFacts
from machd.clock import SystemClock
from machd.engine.assembly import make_engine
from machd_probes import prober
from machd_probes.subject import Extent, Subject

_MAX_ROWS = 16

_SMALL = Extent(
    tokens=5,
    lengths=(5, 7, 44, 17, 18, 9, 1),
    scripts=("early leaves", "down to one and up again", "chunked prefill"),
    has_long_row=False,
)
"""Less of everything than the prober computes. The checks need prompts of 7, 18 and 44 tokens; the noise floor is of the last two that
are longer than four, once in pieces of three tokens."""


@dataclass(frozen=True)
class Probed:
    """The prompts of a tiny model, and its caches."""

    facts: CacheFacts
    results: tuple[ProbeResult, ...]


def probed(variant: str, checks: Sequence[str]) -> Probed:
    """Run these checks on a tiny model that is built anew, as the prober does."""
    return _checked(prober.tiny_subject(variant), checks)


def probed_a_little(variant: str, checks: Sequence[str]) -> Probed:
    """Run them to a small extent; those that compare with mlx-lm's own model are not among them."""
    # What penalties have counted shows in the tokens that follow.
    extent = replace(_SMALL, tokens=8) if "sampling_isolation" in checks else _SMALL
    loaded = prober.tiny_loaded(variant)
    engine = make_engine(loaded, max_rows=_MAX_ROWS)
    return _checked(Subject(engine, extent, model=loaded.model), checks)


def _checked(subject: Subject, checks: Sequence[str]) -> Probed:
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
