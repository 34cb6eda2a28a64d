"""Size of the expert bank (``experts.resident_gb``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

_SPARE_SHARE = 0.1
"""Share of the available memory that ``auto`` leaves to steps and the rest of the process."""

_MIN_SPARE_BYTES = 440 << 20
"""Memory that a bank of a named size has to leave to steps; ``auto`` leaves a KV budget, too. mlx does not look at what its allocator returns on the CPU, so a
step that finds none ends the process: measured at the start of a model of 6.4 GB with 0.39 GB
left, not with 0.49."""

_MAX_KV_SHARE = 0.25
"""Share of the available memory that ``auto`` leaves to the KV cache at most."""


@dataclass(frozen=True, slots=True)
class Residency:
    """The bytes that experts may take, ``auto`` for what the rest leaves, and the KV budget, which ``auto`` leaves free."""

    bytes: int | Literal["auto"]
    kv_budget_bytes: int

    @property
    def spare_bytes(self) -> int:
        """Memory that has to be left beside the bank and all other weights."""
        return 0 if self.bytes == "auto" else _MIN_SPARE_BYTES

    def bank_bytes(self, *, available_bytes: int, dense_bytes: int, experts_bytes: int) -> int:
        """Return the bytes of the bank; ``available_bytes`` can be taken before the model is loaded."""
        if self.bytes != "auto":
            return min(self.bytes, experts_bytes)
        spare_bytes = int(available_bytes * _SPARE_SHARE)
        kv_bytes = min(self.kv_budget_bytes, int(available_bytes * _MAX_KV_SHARE))
        left_bytes = available_bytes - dense_bytes - kv_bytes - spare_bytes
        return max(min(left_bytes, experts_bytes), 0)
