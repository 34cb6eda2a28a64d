"""Fit: what a model needs against what a device holds, and what an operator is told."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from machd.capabilities.fit import Fit, FitVerdict, MemoryNeeds, judge_fit

GB = 1_000_000_000

NEEDS = MemoryNeeds(
    weights_bytes=8 * GB,
    working_bytes=1 * GB,
    kv_budget_bytes=4 * GB,
    bytes_per_token=100_000,
    bytes_per_sequence=0,
    context_tokens=32_768,
)

SIZES = st.integers(min_value=0, max_value=200 * GB)


def judged(needs: MemoryNeeds, device: float, available: float | None = None) -> FitVerdict:
    """The verdict on a device of so many GB, all of them free unless said."""
    free = device if available is None else available
    return judge_fit(needs, device_memory_bytes=int(device * GB), available_bytes=int(free * GB))


def test_all_of_it_fits() -> None:
    """Weights, working memory and the whole budget are compared, to the byte."""
    assert judged(NEEDS, 13).fit is Fit.FITS
    assert judged(NEEDS, 13).fitting_context_tokens == 32_768
    assert "needs 9.00 GB of 13.00 GB" in judged(NEEDS, 13).reason
    assert "up to 4.00 GB more" in judged(NEEDS, 13).reason
    assert judged(NEEDS, 12.999).fit is Fit.TIGHT


def test_a_budget_that_does_not_fit_is_tight() -> None:
    """The model runs; the reason names the setting, and the context is what the device leaves."""
    verdict = judged(NEEDS, 10)
    assert verdict.fit is Fit.TIGHT
    assert "continuous_batching.kv_budget_gb" in verdict.reason
    assert "10,000 tokens of the model's 32,768" in verdict.reason
    assert verdict.fitting_context_tokens == 10_000
    assert verdict.budget_context_tokens == 32_768


def test_memory_that_others_hold_is_tight() -> None:
    """A model that fits the device but not its free memory asks for free memory."""
    verdict = judged(NEEDS, 24, available=5)
    assert verdict.fit is Fit.TIGHT
    assert "the 5.00 GB that are free now of the device's 24.00 GB" in verdict.reason
    assert verdict.fitting_context_tokens == 32_768


def test_weights_that_do_not_fit() -> None:
    """The reason has the sizes and what to do; no context is promised."""
    verdict = judged(NEEDS, 9)
    assert verdict.fit is Fit.WONT_FIT
    assert "weights (8.00 GB)" in verdict.reason
    assert "smaller" in verdict.reason
    assert verdict.fitting_context_tokens == 0


def test_the_budget_limits_the_context() -> None:
    """A small budget on a large device fits, and says how long one sequence may be."""
    verdict = judged(replace(NEEDS, kv_budget_bytes=GB, bytes_per_sequence=GB // 2), 64)
    assert verdict.fit is Fit.FITS
    assert verdict.budget_context_tokens == verdict.fitting_context_tokens == 5_000
    assert "5,000 tokens of the model's 32,768" in verdict.reason


def test_state_alone_costs_no_position() -> None:
    """A recurrent model has its whole context where its state fits, and none where it does not."""
    recurrent = replace(NEEDS, bytes_per_token=0, bytes_per_sequence=GB)
    assert judged(recurrent, 64).fitting_context_tokens == 32_768
    assert judged(replace(recurrent, kv_budget_bytes=GB - 1), 64).fitting_context_tokens == 0


@given(weights=SIZES, budget=SIZES, device=SIZES, available=SIZES, state=SIZES)
def test_what_is_promised_is_there(
    weights: int, budget: int, device: int, available: int, state: int
) -> None:
    """The fitting context never takes more than the budget, nor more than the device has left."""
    needs = replace(NEEDS, weights_bytes=weights, kv_budget_bytes=budget, bytes_per_sequence=state)
    verdict = judge_fit(needs, device_memory_bytes=device, available_bytes=available)
    tokens = verdict.fitting_context_tokens
    assert 0 <= tokens <= verdict.budget_context_tokens <= needs.context_tokens
    kv_bytes = tokens * needs.bytes_per_token + state
    if tokens:
        assert kv_bytes <= budget
        assert needs.base_bytes + kv_bytes <= device
    if verdict.fit is Fit.WONT_FIT:
        assert tokens == 0
