"""Who may start: what the KV cache can promise, and what one sequence is promised of it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum

from machd.engine.protocol import Lane, slab_rows
from machd.errors import KvBudgetExceededError, KvBudgetSpentError

__all__ = ["Batching", "KvBudget", "KvPolicy", "check_budget", "choose_lane", "padded_bytes"]


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


def padded_bytes(kv: KvBudget, reserved_tokens: Collection[int], *, max_rows: int) -> int:
    """What the batch lane's cache can come to: a rectangle as long as its longest row.

    Args:
        kv: What a position and a sequence cost.
        reserved_tokens: Of each row of the batch lane.
        max_rows: The most rows that the lane can have.
    """
    rows = len(reserved_tokens)
    if not rows:
        return 0
    positions = slab_rows(rows, max_rows) * max(reserved_tokens)
    return positions * kv.bytes_per_token + rows * kv.bytes_per_sequence


def choose_lane(
    kv: KvBudget, tokens: int, *, batch: tuple[int, ...], serial: tuple[int, ...], max_rows: int
) -> Lane | None:
    """Where a decode of ``tokens`` positions fits beside those that run, or None for nowhere yet.

    One that would make the batch's rectangle too large may still fit alone, without padding. There
    is one serial row at a time, because each of them costs all others a turn.

    Args:
        kv: What there is.
        tokens: Positions that are to be promised.
        batch: Positions promised to each row of the batch lane.
        serial: Positions promised to each row of the serial lane.
        max_rows: The most rows that the batch lane can have.
    """
    serial_bytes = sum(kv.reservation_bytes(one) for one in serial)
    joined_bytes = padded_bytes(kv, (*batch, tokens), max_rows=max_rows)
    if joined_bytes + serial_bytes <= kv.budget_bytes:
        return Lane.BATCH
    if serial:
        return None
    alone_bytes = padded_bytes(kv, batch, max_rows=max_rows) + kv.reservation_bytes(tokens)
    return Lane.SERIAL if alone_bytes <= kv.budget_bytes else None


def check_budget(
    kv: KvBudget, tokens: tuple[int, ...], *, promised_bytes: int, retry_after_s: int
) -> None:
    """Refuse a request whose decodes can never have what they need, or not now under ``reject``.

    Under ``reject`` all decodes of a request have to fit together, since none of them may wait.

    Args:
        kv: What there is.
        tokens: Positions that each of the request's decodes is to be promised.
        promised_bytes: What those that run and wait were promised.
        retry_after_s: When to come back.

    Raises:
        KvBudgetExceededError: It can never fit.
        KvBudgetSpentError: It would fit if others did not run or wait.
    """
    if not tokens:
        return
    is_reject = kv.policy is KvPolicy.REJECT
    judged = tokens if is_reject else (max(tokens),)
    needed_bytes = sum(kv.reservation_bytes(one) for one in judged)
    if needed_bytes > kv.budget_bytes:
        raise KvBudgetExceededError(
            f"{sum(judged)} tokens of prompt and completion together need {needed_bytes} bytes of "
            f"KV cache and the budget is {kv.budget_bytes} bytes; ask for fewer tokens",
            param="max_tokens",
        )
    if is_reject and needed_bytes > kv.budget_bytes - promised_bytes:
        raise KvBudgetSpentError(
            f"{needed_bytes} bytes of KV cache are needed and {promised_bytes} of "
            f"{kv.budget_bytes} are promised to others; try again later",
            retry_after_s=retry_after_s,
        )
