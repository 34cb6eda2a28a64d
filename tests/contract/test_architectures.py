"""The probe's measurements decide: architectures of every kind, and those whose layers are mended."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import pytest
from support.engines.probing import probed, without_compilation

from machd.capabilities.evidence import Evidence, Outcome
from machd.capabilities.facts import KvCacheKind
from machd.capabilities.verdict import Source, Support
from machd.capabilities.verdicts import judge
from machd_probes.catalogue import BATCHING_CHECKS, CHECK_NAMES
from machd_probes.comparison import tolerated
from machd_probes.prober import probe_architecture

_SUPPORTED = {
    "smollm3": KvCacheKind.STANDARD,
    "gemma3_text": KvCacheKind.ROTATING,
    "qwen3_5": KvCacheKind.HYBRID_GDN,
    "lfm2": KvCacheKind.HYBRID,
    "mamba": KvCacheKind.RECURRENT,
    "falcon_h1": KvCacheKind.NESTED,
    "baichuan_m1": KvCacheKind.NESTED,
    # Through mlx-lm's own batch path these raise, or say something else than alone; the other
    # mended ones are in test_probe_can_fail.py, with and without what mends them.
    "nemotron-nas": KvCacheKind.STANDARD,
    "olmo": KvCacheKind.STANDARD,
    "longcat_flash_ngram": KvCacheKind.NESTED,
}

_BLOCKED = {
    "llama4": (KvCacheKind.CHUNKED, "layers attend in chunks (ChunkedKVCache)"),
    "deepseek_v41": (KvCacheKind.COMPRESSED, "a cache class of its own (LayerCache)"),
}

_LEAST_CASES = 60
"""Rows compared; those of windows come on top."""

_LONG_RUN = {
    *("baichuan_m1", "deepseek_v41", "longcat_flash_ngram", "nemotron-nas", "olmo"),
    *("mamba", "lfm2", "falcon_h1", "gemma3_text", "smollm3"),
}
"""They take several times what the others do, or another one has their kind of cache or of state."""


def _parameter(name: str) -> object:
    return pytest.param(name, marks=[pytest.mark.long] if name in _LONG_RUN else [])


@pytest.fixture(autouse=True, scope="module")
def _no_compilation() -> Iterator[None]:
    with without_compilation():
        yield


@pytest.mark.parametrize("name", [_parameter(name) for name in _SUPPORTED])
def test_an_architecture_is_batched_without_a_mismatch(name: str) -> None:
    """Measured on its tiny models: rows of a batch say what they say alone, token for token."""
    report = probe_architecture(name)

    assert report.problem == ""
    assert report.facts is not None
    assert report.facts.kind is _SUPPORTED[name]
    assert tuple(result.probe for result in report.results) == CHECK_NAMES
    verdict = judge(report.facts, report.results).continuous_batching
    assert (verdict.support, verdict.source) == (Support.SUPPORTED, Source.MEASURED)
    evidence = verdict.evidence
    assert isinstance(evidence, Evidence)
    assert evidence.token_mismatches == 0
    assert evidence.max_logprob_diff <= tolerated(evidence.noise_floor)
    assert evidence.cases >= _LEAST_CASES
    assert evidence == Evidence.together(
        result.evidence for result in report.results if result.probe in BATCHING_CHECKS
    )


@pytest.mark.parametrize("name", [_parameter(name) for name in _BLOCKED])
def test_what_cannot_be_batched_is_blocked_with_the_reason(name: str) -> None:
    """The rule says which cache it is, whatever was measured; the row alone is right all the same."""
    kind, reason = _BLOCKED[name]

    report = probed(name, ("alone", "batch_parity"))

    assert report.facts.kind is kind
    verdict = judge(report.facts, report.results).continuous_batching
    assert (verdict.support, verdict.source) == (Support.BLOCKED, Source.RULE)
    assert reason in verdict.reason
    assert "one at a time" in verdict.reason
    by_probe = {result.probe: result.outcome for result in report.results}
    assert by_probe["alone"] is Outcome.PASSED
    assert by_probe["batch_parity"] is not Outcome.PASSED


@pytest.mark.skipif(mx.metal.is_available(), reason="it can be built here")
def test_what_cannot_be_built_is_a_row_that_says_why() -> None:
    """An architecture that needs Metal is a problem with that name, not an exception."""
    report = probe_architecture("bitnet")

    assert (report.facts, report.results) == (None, ())
    assert "No Metal back-end" in report.problem
