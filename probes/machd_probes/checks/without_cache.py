"""mlx-lm's own model says with a cache what it says without. Tells of mlx-lm, not of machd."""

from __future__ import annotations

from machd.capabilities.evidence import Outcome
from machd_probes.finding import Finding
from machd_probes.passes import compared_passes
from machd_probes.subject import Subject

_TOLERATED = 0.02
"""In nats, float32. Models that are wrong alone are off by whole nats."""


def probe(subject: Subject) -> Finding:
    """One pass over a text without a cache, against chunks and single tokens with one."""
    passes = subject.passes(subject.plain)
    text = subject.prompt(33, 3)
    whole = passes.feed(text, None)
    caches = passes.new_caches()
    first = passes.feed(text[:28], caches)
    rest = passes.continued(text[28:], caches)
    evidence = compared_passes(whole[:28], first, subject.noise_floor, _TOLERATED)
    evidence = evidence.together(
        [evidence, compared_passes(whole[28:], rest, subject.noise_floor, _TOLERATED)]
    )
    if evidence.token_mismatches == 0 and evidence.max_logprob_diff <= _TOLERATED:
        return Finding(Outcome.PASSED, evidence=evidence)
    detail = (
        f"with a cache the model says something else than without ({evidence.max_logprob_diff:.2g} "
        "nats), before any other row is there"
    )
    return Finding(Outcome.FAILED, detail, evidence)
