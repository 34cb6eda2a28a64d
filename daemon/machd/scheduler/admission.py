"""Who may start: what the KV cache can promise, and what one sequence is promised of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from machd.engine.protocol.step import Lane, slab_rows
from machd.errors import KvBudgetExceededError, KvBudgetSpentError


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
        prefill_chunk_tokens: Prompt tokens in one step beside rows that sequence; None measures.
        coalesce: Whether identical deterministic sequences share one sequence.
    """

    max_b: int
    window_s: float
    prefill_chunk_tokens: int | None
    coalesce: bool
    kv: KvBudget


@dataclass(frozen=True, slots=True)
class Promised:
    """Positions that rows were promised, by lane.

    Attributes:
        max_rows: The most rows that the batch lane can have.
    """

    batch: tuple[int, ...] = ()
    serial: tuple[int, ...] = ()
    max_rows: int = 1

    def bytes_of(self, kv: KvBudget) -> int:
        """What all of them can come to.

        The batch lane's slab is as long as its longest row.
        """
        rows = len(self.batch)
        positions = slab_rows(rows, self.max_rows) * max(self.batch) if rows else 0
        batch_bytes = positions * kv.bytes_per_token + rows * kv.bytes_per_sequence
        return batch_bytes + sum(kv.reservation_bytes(one) for one in self.serial)

    def lane_for(self, kv: KvBudget, tokens: int) -> Lane | None:
        """Where a sequence of ``tokens`` positions fits beside the others, or None for nowhere yet.

        One that would make the slab too large may still fit alone, without padding.
        There is one serial row at a time, because each of them costs all others a turn.
        """
        lanes = (Lane.BATCH,) if self.serial else (Lane.BATCH, Lane.SERIAL)
        for lane in lanes:
            if self.with_row(lane, tokens).bytes_of(kv) <= kv.budget_bytes:
                return lane
        return None

    def with_row(self, lane: Lane, tokens: int) -> Promised:
        """One row more."""
        if lane is Lane.BATCH:
            return replace(self, batch=(*self.batch, tokens))
        return replace(self, serial=(*self.serial, tokens))

    def joined_by(self, kv: KvBudget, tokens: Iterable[int]) -> Promised | None:
        """With as many of them as there are rows for, in order, or None where one does not fit."""
        promised = self
        for one in tokens:
            if len(promised.batch) + len(promised.serial) >= self.max_rows:
                break  # who comes now waits for a slot, whatever room there is
            lane = promised.lane_for(kv, one)
            if lane is None:
                return None
            promised = promised.with_row(lane, one)
        return promised


def check_budget(
    kv: KvBudget,
    tokens: Sequence[int],
    *,
    running: Promised,
    waiting: Iterable[int],
    retry_after_s: int,
) -> None:
    """Refuse a request whose sequences can never have what they need, or not now under ``reject``.

    Under ``reject`` as many sequences of a request as can run together have to fit together, beside
    all who came before: none of them is to wait for KV cache.

    Args:
        kv: What there is.
        tokens: Positions that each of the request's sequences is to be promised.
        running: What was promised.
        waiting: Positions that are to be promised before, in order.
        retry_after_s: When to come back.

    Raises:
        KvBudgetExceededError: It can never fit.
        KvBudgetSpentError: It would fit if others did not run or wait.
    """
    if not tokens:
        return
    is_reject = kv.policy is KvPolicy.REJECT
    judged = tuple(tokens) if is_reject else (max(tokens),)
    needed_bytes = sum(kv.reservation_bytes(one) for one in judged)
    nobody = Promised(max_rows=running.max_rows)
    if nobody.lane_for(kv, max(tokens)) is None or nobody.joined_by(kv, judged) is None:
        raise KvBudgetExceededError(
            f"{sum(judged)} tokens of prompt and completion together need {needed_bytes} bytes of "
            f"KV cache and the budget is {kv.budget_bytes} bytes; ask for fewer tokens",
            param="max_tokens",
        )
    if is_reject and running.joined_by(kv, (*waiting, *judged)) is None:
        raise KvBudgetSpentError(
            f"{needed_bytes} bytes of KV cache are needed and of {kv.budget_bytes} bytes "
            f"{running.bytes_of(kv)} are promised to those that run; try again later",
            retry_after_s=retry_after_s,
        )
