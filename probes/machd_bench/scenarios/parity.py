"""Is it right on this machine: tiny models of several architectures, and the served model's own weights.

Both are ``machd check``, which compares a batch's log-probabilities with those of each row alone. Its texts may name files,
so that verdicts, counts and differences are all that a row takes of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator

import msgspec
from msgspec import Struct

from machd.capabilities.evidence import Evidence, Outcome
from machd.capabilities.verdict import Verdict
from machd.served.capabilities import ModelCapabilities
from machd_bench.bench import Bench, Mode, Plan
from machd_bench.check_process import check_json
from machd_bench.report import Figure, Row
from machd_bench.scenario import Scenario

ARCHITECTURES = (
    *("llama", "qwen3", "gemma3_text", "gpt_oss", "qwen3_moe"),
    *("deepseek_v3", "qwen3_next", "mamba2"),
)
"""One of each kind of cache and layer: plain, normed, windows, sinks, experts, latent, hybrid, state."""

_FEATURES = (
    *("continuous_batching", "batched_specdec", "kv_quantization"),
    *("prefix_cache", "chunked_prefill", "expert_streaming"),
)
_REQUESTS = 8
"""An architecture takes about as long as so many answers."""


class _Probe(Struct):
    probe: str
    outcome: Outcome
    evidence: Evidence | None = None
    duration_s: float = 0.0


class _Architecture(Struct):
    architecture: str
    continuous_batching: Verdict
    probes: list[_Probe] = []


class _Matrix(Struct):
    architectures: list[_Architecture]


def architecture_row(found: _Architecture) -> Row:
    """Sum up the probes of one architecture; differences are in nats, over all probes that measured one."""
    counts = Counter(probe.outcome for probe in found.probes)
    evidence = [probe.evidence for probe in found.probes if probe.evidence]
    return Row(
        case=found.architecture,
        figures={
            "batching": found.continuous_batching.support.value,
            **{outcome.value: counts[outcome] for outcome in Outcome},
            "wrong_tokens": sum(one.token_mismatches for one in evidence),
            "max_difference": max((one.max_logprob_diff for one in evidence), default=None),
            "probes_s": sum(probe.duration_s for probe in found.probes),
            **{f"probe_{probe.probe}": probe.outcome.value for probe in found.probes},
        },
    )


def feature_row(name: str, verdict: Verdict) -> Row:
    """The verdict on one feature of the served model."""
    figures: dict[str, Figure] = {"verdict": verdict.support.value, "source": verdict.source.value}
    if isinstance(evidence := verdict.evidence, Evidence):
        figures |= {
            "cases": evidence.cases,
            "wrong_tokens": evidence.token_mismatches,
            "max_difference": evidence.max_logprob_diff,
            "noise": evidence.noise_floor,
        }
    return Row(case=name.replace("_", " "), figures=figures)


async def _parity(bench: Bench) -> AsyncGenerator[Row]:
    names = bench.plan.architectures or ARCHITECTURES
    args = [arg for name in names for arg in ("--arch", name)]
    printed = await check_json((*args, "--no-cache"))
    bench.progress.advance(_REQUESTS * len(names))
    for found in msgspec.json.decode(printed, type=_Matrix).architectures:
        yield architecture_row(found)


async def _weights(bench: Bench) -> AsyncGenerator[Row]:
    printed = await check_json((*bench.serve_args, "--measure"))
    bench.progress.advance(_REQUESTS)
    found = msgspec.json.decode(printed, type=ModelCapabilities)
    for name in _FEATURES:
        if isinstance(verdict := getattr(found, name), Verdict):
            yield feature_row(name, verdict)


def _parity_requests(plan: Plan) -> int:
    return _REQUESTS * len(plan.architectures or ARCHITECTURES)


PARITY = Scenario(
    name="parity",
    about="tiny models of architectures: a batch's log-probabilities against each row alone",
    run=_parity,
    modes=frozenset({Mode.SETTINGS}),
    columns=("batching", "passed", "failed", "errored", "wrong_tokens", "probes_s"),
    requests=_parity_requests,
    starts_servers=True,
    has_goal=False,
)
WEIGHTS = Scenario(
    name="weights",
    about="the same checks on the served model's own weights",
    run=_weights,
    modes=frozenset({Mode.SETTINGS}),
    columns=("verdict", "source", "cases", "wrong_tokens"),
    requests=lambda _plan: _REQUESTS,
    starts_servers=True,
    has_goal=False,
)
