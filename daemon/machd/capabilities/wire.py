"""Facts and verdicts in the words of ``/v1/capabilities`` and ``machd check --json``."""

from __future__ import annotations

from msgspec import UNSET

from machd.capabilities import evidence
from machd.capabilities.document import (
    CacheDetails,
    Evidence,
    FeatureVerdict,
    ModelCapabilities,
    PrefixCacheVerdict,
    SpeculationReport,
    Versions,
)
from machd.capabilities.facts import CacheFacts, KvCacheKind
from machd.capabilities.rules import PrefixVerdict
from machd.capabilities.verdict import Verdict
from machd.capabilities.verdicts import ModelVerdicts


def wire_capabilities(
    architecture: str, facts: CacheFacts, verdicts: ModelVerdicts, versions: Versions
) -> ModelCapabilities:
    """One model or architecture as the outside sees it.

    Args:
        architecture: mlx-lm's name of it.
        facts: Of its caches.
        verdicts: On it.
        versions: That the verdicts hold for.
    """
    batched_specdec = wire_verdict(verdicts.batched_specdec)
    is_nested = facts.kind is KvCacheKind.NESTED
    return ModelCapabilities(
        architecture=architecture,
        kv_cache_kind=facts.kind.value,
        layers=facts.class_counts,
        nested=list(facts.nested_classes) if is_nested else UNSET,
        continuous_batching=wire_verdict(verdicts.continuous_batching),
        batched_specdec=batched_specdec,
        kv_quantization=wire_verdict(verdicts.kv_quantization),
        prefix_cache=_prefix_verdict(verdicts.prefix_cache),
        chunked_prefill=wire_verdict(verdicts.chunked_prefill),
        speculation=_speculation(verdicts.speculation, batched_specdec),
        trimmable=facts.trimmable,
        cache=CacheDetails(
            keep_tokens=list(facts.keep_tokens),
            window_tokens=list(facts.window_tokens),
            mergeable=facts.mergeable,
            bytes_per_token=facts.bytes_per_token,
            bytes_per_sequence=facts.bytes_per_sequence,
        ),
        versions=versions,
    )


def wire_verdict(verdict: Verdict) -> FeatureVerdict:
    """One verdict as the outside sees it."""
    return FeatureVerdict(
        verdict=verdict.support.value,
        reason=verdict.reason,
        source=verdict.source.value,
        evidence=_evidence(verdict.evidence) if verdict.evidence is not None else UNSET,
    )


def _prefix_verdict(verdict: PrefixVerdict) -> PrefixCacheVerdict:
    plain = wire_verdict(verdict)
    return PrefixCacheVerdict(
        verdict=plain.verdict,
        reason=plain.reason,
        source=plain.source,
        evidence=plain.evidence,
        extent=verdict.extent.value,
    )


def _speculation(verdict: Verdict, batched_specdec: FeatureVerdict) -> SpeculationReport:
    plain = wire_verdict(verdict)
    return SpeculationReport(
        verdict=plain.verdict,
        reason=plain.reason,
        source=plain.source,
        evidence=plain.evidence,
        batched_specdec=batched_specdec,
    )


def _evidence(measured: evidence.Evidence) -> Evidence:
    return Evidence(
        token_mismatches=measured.token_mismatches,
        max_logprob_diff=measured.max_logprob_diff,
        noise_floor=measured.noise_floor,
        cases=measured.cases,
    )
