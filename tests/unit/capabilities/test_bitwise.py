"""Equal bits are claimed only where every comparison of a row with itself measured a difference of 0."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from machd.capabilities.bitwise import BITWISE_CHECKS, Computing, judge_bitwise
from machd.capabilities.evidence import Evidence, MeasuredOn, Outcome, ProbeResult
from machd_probes.catalogue import FEATURE_CHECKS

NATIVE = Computing("cpu", "machd-native 0.1.0, OpenBLAS 0.3.21", is_native=True)
EQUAL = Evidence(0, 0.0, 0.0, cases=3)
ALL_EQUAL = tuple(ProbeResult(name, Outcome.PASSED, "", EQUAL) for name in BITWISE_CHECKS)


def _but(name: str, result: ProbeResult | None) -> tuple[ProbeResult, ...]:
    """Return the results of a model without differences, with another result of one check, or none."""
    others: Iterable[ProbeResult] = (one for one in ALL_EQUAL if one.probe != name)
    return tuple(others) if result is None else (*others, result)


def _reason(results: tuple[ProbeResult, ...] | None, computing: Computing = NATIVE) -> str:
    verdict = judge_bitwise(results, computing)
    assert verdict.value is False
    return verdict.reason


def test_bits_are_equal_when_every_check_measured_no_difference() -> None:
    """The reason names the checks, the model they ran and how many cases they compared."""
    verdict = judge_bitwise(ALL_EQUAL, NATIVE)

    assert verdict.value is True
    assert verdict.reason.startswith("measured on a tiny model of the architecture: batch_parity, ")
    assert f"0 nats in {3 * len(BITWISE_CHECKS)} cases (noise 0)" in verdict.reason
    assert all(name in verdict.reason for name in BITWISE_CHECKS)


def test_checks_are_those_of_features_without_the_one_of_a_kv_format() -> None:
    """Quantised keys and values are compared with rounded ones, whose bits are others."""
    assert set(BITWISE_CHECKS) == set(FEATURE_CHECKS) - {"quantized_kv"}


def test_check_that_does_not_apply_is_not_needed() -> None:
    """A model without a window has no window that could overflow."""
    results = _but("window_overflow", ProbeResult("window_overflow", Outcome.UNSUPPORTED, "none"))
    verdict = judge_bitwise(results, NATIVE)

    assert verdict.value is True
    assert "window_overflow" not in verdict.reason


def test_other_checks_change_nothing() -> None:
    """Checks of mlx-lm's own batch, of memory and of quantised keys and values compare other things."""
    differing = Evidence(5, 0.1, 0.004, 3)
    others = tuple(
        ProbeResult(name, Outcome.FAILED, "", differing)
        for name in ("mlx_lm_batch", "quantized_kv")
    )
    assert judge_bitwise((*ALL_EQUAL, *others), NATIVE) == judge_bitwise(ALL_EQUAL, NATIVE)


@pytest.mark.parametrize("backend", ["metal", "cuda"])
def test_nothing_is_claimed_on_a_gpu(backend: str) -> None:
    """Whatever was measured there."""
    assert "not claimed on a GPU" in _reason(ALL_EQUAL, Computing(backend, None, is_native=False))


@pytest.mark.parametrize("blas", ["OpenBLAS 0.3.21", None])
def test_nothing_is_claimed_without_machds_own_kernels(blas: str | None) -> None:
    """Evidence that came with machd was measured with them and does not hold here."""
    assert "are not installed here" in _reason(ALL_EQUAL, replace(NATIVE, blas=blas))


def test_nothing_is_claimed_when_they_compute_a_part_of_the_model() -> None:
    """Installed kernels are not used for weights in a dtype that the settings name."""
    assert "only a part of this model" in _reason(ALL_EQUAL, replace(NATIVE, is_native=False))


def test_nothing_is_claimed_for_quantised_keys_and_values() -> None:
    """The checks compare plain ones."""
    assert "kept as affine8" in _reason(ALL_EQUAL, replace(NATIVE, kv_format="affine8"))


@pytest.mark.parametrize("results", [None, ()])
def test_unmeasured_model_is_told_to_be(results: tuple[ProbeResult, ...] | None) -> None:
    """Without any result the checks are not listed."""
    assert _reason(results) == "not measured yet"


@pytest.mark.parametrize("name", BITWISE_CHECKS)
def test_check_without_a_result_is_named(name: str) -> None:
    """Every check is needed: what one of them would have found is not known."""
    assert _reason(_but(name, None)) == f"not measured yet: {name}"


@pytest.mark.parametrize("outcome", [Outcome.NO_DATA, Outcome.ERRORED, Outcome.MEASURING])
def test_check_without_an_answer_is_named_with_its_detail(outcome: Outcome) -> None:
    """A check that had no time, crashed or still runs has measured nothing."""
    results = _but("trim", ProbeResult("trim", outcome, "running since noon"))
    assert _reason(results) == "not measured yet: trim (running since noon)"


def test_failed_check_is_named() -> None:
    """A row that gives other tokens has other bits."""
    failed = ProbeResult("cache_reuse", Outcome.FAILED, "7 other tokens", Evidence(7, 0.5, 0.0, 3))
    assert _reason(_but("cache_reuse", failed)) == (
        "measured on a tiny model of the architecture: cache_reuse failed: 7 other tokens"
    )


@pytest.mark.parametrize("name", BITWISE_CHECKS)
def test_difference_within_rounding_is_told_in_nats(name: str) -> None:
    """What a feature's verdict tolerates is a difference here."""
    rounded = ProbeResult(name, Outcome.PASSED, "", Evidence(0, 3.8e-6, 0.0, 3))
    reason = _reason(_but(name, rounded))
    assert f"rows differ by at most 3.8e-06 nats ({name}; noise 0)" in reason


def test_difference_is_told_before_what_is_not_measured() -> None:
    """No further measurement can change it."""
    rounded = ProbeResult("batch_parity", Outcome.PASSED, "", Evidence(0, 3.8e-6, 3.3e-6, 3))
    assert "rows differ by at most 3.8e-06 nats (batch_parity; noise 3.3e-06)" in _reason(
        (rounded,)
    )


def test_noise_alone_shows_no_equal_bits() -> None:
    """Two ways of computing a row alone differ, or its dtype is too coarse for the comparison."""
    noisy = ProbeResult("trim", Outcome.PASSED, "", Evidence(0, 0.0, 0.008, 3))
    assert "the noise floor of the comparison is 0.008 nats" in _reason(_but("trim", noisy))


@pytest.mark.parametrize("difference", [0.0, 3.8e-6])
def test_evidence_of_another_library_is_not_enough(difference: float) -> None:
    """Neither a 0 nor a difference that was measured with it says what the library here does."""
    shipped = ProbeResult(
        "batch_parity",
        Outcome.PASSED,
        "",
        Evidence(0, difference, 0.0, 3),
        measured_on=MeasuredOn.SHIPPED_OTHER_BLAS,
    )
    assert _reason(_but("batch_parity", shipped)) == (
        "measured with another library than the one here (machd-native 0.1.0, OpenBLAS 0.3.21)"
    )


def test_shipped_evidence_of_the_same_library_counts() -> None:
    """As it does for features."""
    shipped = tuple(replace(one, measured_on=MeasuredOn.SHIPPED) for one in ALL_EQUAL)
    verdict = judge_bitwise(shipped, NATIVE)
    assert verdict.value is True
    assert "shipped with machd" in verdict.reason
