"""Fit of a model into a device's memory, and the context that fits."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

_GB = 1_000_000_000


class Fit(StrEnum):
    """Verdict on weights, working memory and KV budget against the device's memory."""

    FITS = "fits"
    """All of it, out of what is free now."""

    TIGHT = "tight"
    """The model runs, but not with the whole KV budget, or only once memory is freed."""

    WONT_FIT = "wont_fit"
    """Weights, working memory and one short sequence are more than the device can ever hold."""


@dataclass(frozen=True, slots=True)
class MemoryNeeds:
    """Memory that a model would take.

    Attributes:
        weights_bytes: Of the weights as they would lie in memory.
        working_bytes: Beside weights and KV cache, while it computes.
        kv_budget_bytes: What running sequences may take together.
        bytes_per_token: What one more position costs in one sequence.
        bytes_per_sequence: What a sequence costs whatever its length.
        context_tokens: Positions that the model has.
    """

    weights_bytes: int
    working_bytes: int
    kv_budget_bytes: int
    bytes_per_token: int
    bytes_per_sequence: int
    context_tokens: int

    @property
    def base_bytes(self) -> int:
        """Weights and working memory."""
        return self.weights_bytes + self.working_bytes

    @property
    def total_bytes(self) -> int:
        """All of it, the whole KV budget included."""
        return self.base_bytes + self.kv_budget_bytes

    @property
    def least_bytes(self) -> int:
        """Bytes that one sequence of one position needs."""
        return self.base_bytes + self.bytes_per_sequence + self.bytes_per_token

    def tokens_in(self, kv_bytes: int) -> int:
        """Positions of one sequence alone for which so much KV cache is enough."""
        left_bytes = kv_bytes - self.bytes_per_sequence
        if left_bytes < self.bytes_per_token:
            return 0
        if not self.bytes_per_token:
            return self.context_tokens
        return min(left_bytes // self.bytes_per_token, self.context_tokens)


@dataclass(frozen=True, slots=True)
class FitVerdict:
    """The verdict and its reason, in words that tell an operator what to do.

    Attributes:
        budget_context_tokens: Positions of one sequence that the KV budget allows.
        fitting_context_tokens: The same, where the device leaves less than the budget.
    """

    fit: Fit
    reason: str
    budget_context_tokens: int
    fitting_context_tokens: int


def judge_fit(needs: MemoryNeeds, *, device_memory_bytes: int, available_bytes: int) -> FitVerdict:
    """Compare what a model needs with a device."""
    budget_tokens = needs.tokens_in(needs.kv_budget_bytes)
    left_bytes = max(device_memory_bytes - needs.base_bytes, 0)
    fitting_tokens = needs.tokens_in(min(needs.kv_budget_bytes, left_bytes))
    fit, reason = _compared(needs, device_memory_bytes, available_bytes)
    if fit is not Fit.WONT_FIT and fitting_tokens < needs.context_tokens:
        reason += (
            f"; one sequence may have {fitting_tokens:,} tokens of the model's "
            f"{needs.context_tokens:,}"
        )
    return FitVerdict(fit, reason, budget_tokens, fitting_tokens)


def _compared(needs: MemoryNeeds, device_bytes: int, available_bytes: int) -> tuple[Fit, str]:
    weights, working = _gb(needs.weights_bytes), _gb(needs.working_bytes)
    budget = _gb(needs.kv_budget_bytes)
    if needs.least_bytes > device_bytes:
        return (
            Fit.WONT_FIT,
            (
                f"weights ({weights}) and working memory ({working}) need {_gb(needs.least_bytes)} and "
                f"the device holds {_gb(device_bytes)}: take a smaller or more strongly quantised "
                "model, or a larger device"
            ),
        )
    if needs.total_bytes > device_bytes:
        left = _gb(device_bytes - needs.base_bytes)
        return (
            Fit.TIGHT,
            (
                f"weights ({weights}) and working memory ({working}) leave {left} of the device's "
                f"{_gb(device_bytes)}, less than the KV budget of {budget}: lower "
                "continuous_batching.kv_budget_gb"
            ),
        )
    if needs.total_bytes > available_bytes:
        return (
            Fit.TIGHT,
            (
                f"needs {_gb(needs.base_bytes)}, weights ({weights}) and working memory ({working}); with the "
                f"whole KV budget of {budget} that is more than the {_gb(available_bytes)} that are free now "
                f"of the device's {_gb(device_bytes)}: free some memory, or lower continuous_batching.kv_budget_gb"
            ),
        )
    more = f"; the KV cache may take up to {budget} more" if needs.kv_budget_bytes else ""
    return (
        Fit.FITS,
        (
            f"needs {_gb(needs.base_bytes)} of {_gb(device_bytes)}: weights ({weights}) and working memory "
            f"({working}){more}"
        ),
    )


def _gb(size_bytes: int) -> str:
    """In units of 10^9 bytes, as the KV budget is given."""
    return f"{size_bytes / _GB:.2f} GB"
