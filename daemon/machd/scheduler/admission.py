"""Who may start: what the KV cache can promise, and what one sequence is promised of it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

__all__ = ["Batching", "KvBudget", "KvPolicy"]


class KvPolicy(StrEnum):
    """What happens to a sequence when the budget is spent."""

    DEFER = "defer"
    """It waits until enough is given back."""

    REJECT = "reject"
    """It is turned away at once, with the time after which to try again."""


@dataclass(frozen=True, slots=True)
class KvBudget:
    """Bytes of KV cache and state that running sequences may take together.

    Attributes:
        bytes_per_token: What one more position costs in one sequence, from live cache facts.
        bytes_per_sequence: What a sequence costs whatever its length (recurrent state).
    """

    budget_bytes: int
    bytes_per_token: int
    bytes_per_sequence: int
    policy: KvPolicy

    def reservation_bytes(self, tokens: int) -> int:
        """What a sequence of so many positions, prompt and completion together, is promised."""
        return tokens * self.bytes_per_token + self.bytes_per_sequence


@dataclass(frozen=True, slots=True)
class Batching:
    """How sequences share the engine.

    Attributes:
        max_b: Sequences that run together.
        window_s: How long an idle scheduler waits for company before it starts.
        prefill_chunk_tokens: Prompt tokens in one step beside rows that decode; None measures.
        coalesce: Whether identical deterministic sequences share one decode.
    """

    max_b: int
    window_s: float
    prefill_chunk_tokens: int | None
    coalesce: bool
    kv: KvBudget
