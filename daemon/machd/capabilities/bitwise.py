"""The verdict on equal bits of a row, however it is computed: alone, in a batch, in chunks, from a cache, with drafts.

Verdicts on features tolerate rounding; this one tolerates none. It is about machd's own kernels on the
CPU, whose sums have one order whatever else is computed, and still has to be measured: a model may need
operations of mlx that have none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from msgspec import Struct

from machd.capabilities.evidence import Evidence, MeasuredOn, Outcome, ProbeResult

BITWISE_CHECKS = (
    *("batch_parity", "window_overflow", "rope_positions", "sampling_isolation"),
    *("state_snapshot", "cache_reuse", "trim", "batched_drafts", "chunked_prefill"),
)
"""The checks that compare a row with itself, computed in another way."""

NATIVE_KERNELS = "machd-native"
"""The name of the CPU's library begins so where machd's own kernels are installed."""


@dataclass(frozen=True, slots=True)
class Computing:
    """Device, libraries and formats that a model's bits may depend on.

    Attributes:
        backend: ``cpu``, ``metal`` or ``cuda``.
        blas: The library that multiplies matrices on the CPU; None elsewhere.
        is_native: machd's own kernels, where they are installed, compute every layer of a kind that they know.
        kv_format: The format of keys and values, ``none`` for plain ones.
    """

    backend: str
    blas: str | None
    is_native: bool
    kv_format: str = "none"


class BitwiseVerdict(Struct, frozen=True, kw_only=True):
    """The verdict on equal bits of a row alone, in a batch, in chunks, behind a cached prefix and with drafts.

    Attributes:
        value: Every check that compares a row with itself has measured a difference of 0 with this code and
            what computes here.
    """

    value: bool
    reason: str


def judge_bitwise(results: Sequence[ProbeResult] | None, computing: Computing) -> BitwiseVerdict:
    """Judge a model from the results of its probes; without measurements the answer is no.

    ``results`` are of any probes, one for each; None where nothing was looked up.
    """
    compared = {one.probe: one for one in results or () if one.probe in BITWISE_CHECKS}
    found = tuple(compared.values())
    passed = [one for one in found if one.outcome is Outcome.PASSED]
    obstacle = (
        _obstacle(computing)
        or _failure(found)
        or _difference(passed)
        or _gap(compared)
        or _other_library(passed, computing)
    )
    if obstacle is not None:
        return BitwiseVerdict(value=False, reason=obstacle)
    cases = sum(one.evidence.cases for one in passed)
    return BitwiseVerdict(
        value=True,
        reason=f"{_measured_on(passed)}: {_names(passed)} found no bit of a row changed by what was computed "
        f"with it, 0 nats in {cases} cases (noise 0)",
    )


def _obstacle(computing: Computing) -> str | None:
    """Return what no evidence about the model can outweigh."""
    if computing.backend != "cpu":
        return (
            "not claimed on a GPU, where the order of sums may depend on what is computed together"
        )
    if computing.kv_format != "none":
        return f"not measured with keys and values kept as {computing.kv_format}"
    if not (computing.blas or "").startswith(NATIVE_KERNELS):
        return (
            "machd's own kernels (machd-native) are not installed here or have none for this processor, and "
            "without them the order of sums depends on how many rows are computed together"
        )
    if not computing.is_native:
        return (
            "machd's own kernels compute only a part of this model: they need model.dtype auto or float32, all "
            "weights in memory, one rank, a packing that they know and heads of a multiple of 16 numbers"
        )
    return None


def _failure(found: Iterable[ProbeResult]) -> str | None:
    failed = [one for one in found if one.outcome is Outcome.FAILED]
    if not failed:
        return None
    reasons = (
        f"{one.probe} failed: {one.detail}" if one.detail else f"{one.probe} failed"
        for one in failed
    )
    return f"{_measured_on(failed)}: {'; '.join(reasons)}"


def _difference(passed: Iterable[ProbeResult]) -> str | None:
    """Return what was measured with the library that computes here; another one's figures say nothing."""
    here = [one for one in passed if one.measured_on is not MeasuredOn.SHIPPED_OTHER_BLAS]
    together = Evidence.together(one.evidence for one in here)
    differing = [one for one in here if _differs(one.evidence)]
    if differing:
        return (
            f"{_measured_on(differing)}: rows differ by at most {together.max_logprob_diff:.2g} nats "
            f"({_names(differing)}; noise {together.noise_floor:.2g})"
        )
    if together.noise_floor:
        return (
            f"{_measured_on(here)}: equal bits are not shown, because the noise floor of the comparison is "
            f"{together.noise_floor:.2g} nats"
        )
    return None


def _differs(evidence: Evidence) -> bool:
    return bool(evidence.max_logprob_diff or evidence.token_mismatches)


def _gap(compared: dict[str, ProbeResult]) -> str | None:
    """Return which checks say nothing; what a model lacks needs no check."""
    answered = {Outcome.PASSED, Outcome.UNSUPPORTED}
    open_checks = [
        name
        for name in BITWISE_CHECKS
        if name not in compared or compared[name].outcome not in answered
    ]
    if not open_checks:
        return None
    details = dict.fromkeys(compared[name].detail for name in open_checks if name in compared)
    told = "; ".join(detail for detail in details if detail)
    what = "not measured yet"
    if len(open_checks) < len(BITWISE_CHECKS):
        what = f"{what}: {', '.join(open_checks)}"
    return f"{what} ({told})" if told else what


def _other_library(passed: Iterable[ProbeResult], computing: Computing) -> str | None:
    if all(one.measured_on is not MeasuredOn.SHIPPED_OTHER_BLAS for one in passed):
        return None
    return f"measured with another library than the one here ({computing.blas})"


def _measured_on(results: Iterable[ProbeResult]) -> str:
    return f"measured on {' and '.join(dict.fromkeys(one.measured_on.value for one in results))}"


def _names(results: Iterable[ProbeResult]) -> str:
    return ", ".join(one.probe for one in results)
