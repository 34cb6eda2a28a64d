"""Keys and values may be kept in 8 bits."""

from __future__ import annotations

import mlx.core as mx

from machd.capabilities.evidence import Outcome
from machd_probes.finding import Finding, unsupported
from machd_probes.passes import Passes, compared_passes
from machd_probes.subject import Subject

__all__ = ["probe"]

_BITS = 8
_GROUP_SIZE = 32
_TOLERATED = 0.5
"""In nats. 8 bits move a log-probability of the tiny models by 0.01 to 0.1."""


def probe(subject: Subject) -> Finding:
    """A prompt with float caches, which are quantised, and then some tokens more."""
    passes = Passes(subject.module)
    prefix, suffix = subject.prompt(33, 33), subject.prompt(8, 8)
    caches = passes.new_caches()
    passes.feed(prefix, caches)
    quantised = [_quantised(cache) for cache in caches]
    if all(new is old for new, old in zip(quantised, caches, strict=True)):
        return unsupported("no cache has keys and values that mlx-lm could quantise")
    heard = passes.continued(suffix, quantised)
    fresh = passes.new_caches()
    passes.feed(prefix, fresh)
    expected = passes.continued(suffix, fresh)
    evidence = compared_passes(expected, heard, subject.noise_floor, _TOLERATED)
    if evidence.max_logprob_diff <= _TOLERATED and evidence.token_mismatches == 0:
        return Finding(Outcome.PASSED, evidence=evidence)
    detail = f"8-bit keys and values move log-probabilities by {evidence.max_logprob_diff:.2g} nats"
    return Finding(Outcome.FAILED, detail, evidence)


def _quantised(cache: object) -> object:
    """The cache in 8 bits; itself where mlx-lm has no form of it."""
    keys, values = getattr(cache, "keys", None), getattr(cache, "values", None)
    if not isinstance(keys, mx.array) or not isinstance(values, mx.array):
        return cache
    if keys.shape[-1] % _GROUP_SIZE or values.shape[-1] % _GROUP_SIZE:
        return cache
    quantise = getattr(cache, "to_quantized", None)
    if quantise is None:
        return cache
    try:
        return quantise(group_size=_GROUP_SIZE, bits=_BITS)
    except NotImplementedError:  # so mlx-lm says that rotating caches have no such form
        return cache
