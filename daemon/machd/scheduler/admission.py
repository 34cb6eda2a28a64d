"""KV budget: the reservation of one sequence, and which lane has room for it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from machd.engine.protocol.slab_size import reserved_columns, slab_rows
from machd.engine.protocol.step import Lane
from machd.errors import KvBudgetExceededError, KvBudgetSpentError


class KvPolicy(StrEnum):
    """Admission's answer to a request that does not fit into the rest of the budget."""

    DEFER = "defer"
    """Wait until enough is released."""

    REJECT = "reject"
    """Refuse at once, with a time after which to retry."""


@dataclass(frozen=True, slots=True)
class KvBudget:
    """Bytes of KV cache and state that running sequences may take together.

    Attributes:
        bytes_per_token: Bytes of one position in one sequence, from live cache facts.
        bytes_per_sequence: Bytes of a sequence of any length (recurrent state).
        has_length_classes: A row of the batch lane takes the columns of its length class; otherwise all rows
            take as many as the longest.
        shares_prefixes: Rows of the batch lane can share a common prefix of their prompts.
    """

    budget_bytes: int
    bytes_per_token: int
    bytes_per_sequence: int
    policy: KvPolicy
    has_length_classes: bool = False
    shares_prefixes: bool = False

    def reservation_bytes(self, tokens: int) -> int:
        """Bytes to reserve for a sequence of ``tokens`` positions, prompt and completion together."""
        return tokens * self.bytes_per_token + self.bytes_per_sequence


@dataclass(frozen=True, slots=True)
class Batching:
    """Settings of continuous batching.

    Attributes:
        max_b: Sequences that run together.
        window_s: Time that an idle scheduler waits for more requests before it starts.
        prefill_chunk_tokens: Prompt tokens in a step beside decoding rows; None measures.
        coalesce: Identical requests share one sequence.
        prefill_share: Share of a step's time that prompts get beside decoding rows.
    """

    max_b: int
    window_s: float
    prefill_chunk_tokens: int | None
    coalesce: bool
    kv: KvBudget
    prefill_share: float


@dataclass(frozen=True, slots=True)
class Promised:
    """Reserved positions of running rows, by lane.

    Attributes:
        batch: Positions of each row of the batch lane, without its shared prefix.
        max_rows: Most rows of the batch lane.
        shared: Positions of each prefix that rows of the batch lane share, counted once.
    """

    batch: tuple[int, ...] = ()
    serial: tuple[int, ...] = ()
    max_rows: int = 1
    shared: tuple[int, ...] = ()

    def bytes_of(self, kv: KvBudget) -> int:
        """Bytes that all rows can take, spare columns of the batch's arrays included."""
        rows = len(self.batch)
        if kv.has_length_classes:
            columns = reserved_columns(self.batch) + sum(self.shared)
        else:
            columns = slab_rows(rows, self.max_rows) * max(self.batch, default=0)
        batch_bytes = columns * kv.bytes_per_token + rows * kv.bytes_per_sequence
        return batch_bytes + sum(kv.reservation_bytes(one) for one in self.serial)

    def lane_for(self, kv: KvBudget, tokens: int) -> Lane | None:
        """Return a lane with room for ``tokens`` more positions; None while there is none.

        A sequence that would make the batch's arrays too large may still fit in the serial lane, which has no
        spare columns. That lane has one row at a time, because each serial row takes steps from the batch.
        """
        lanes = (Lane.BATCH,) if self.serial else (Lane.BATCH, Lane.SERIAL)
        for lane in lanes:
            if self.with_row(lane, tokens).bytes_of(kv) <= kv.budget_bytes:
                return lane
        return None

    def with_row(self, lane: Lane, tokens: int) -> Promised:
        """Add a row."""
        if lane is Lane.BATCH:
            return replace(self, batch=(*self.batch, tokens))
        return replace(self, serial=(*self.serial, tokens))

    def joined_by(self, kv: KvBudget, tokens: Iterable[int]) -> Promised | None:
        """Add sequences in order until every row is taken; None if one does not fit."""
        promised = self
        for one in tokens:
            if len(promised.batch) + len(promised.serial) >= self.max_rows:
                break  # the others wait for a slot anyway
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
    """Refuse a request that can never fit the KV budget, or under ``reject`` does not fit now.

    Under ``reject`` all sequences of a request that can run together have to fit beside all running and
    waiting ones, so that none waits for KV cache.

    Args:
        kv: The budget.
        tokens: Positions of each sequence of the request.
        running: Reservations of running sequences.
        waiting: Positions of each waiting sequence, in queue order.
        retry_after_s: Retry-After of KvBudgetSpentError.

    Raises:
        KvBudgetExceededError: The request can never fit.
        KvBudgetSpentError: It would fit into an idle daemon.
    """
    if not tokens:
        return
    is_reject = kv.policy is KvPolicy.REJECT
    judged = tuple(tokens) if is_reject else (max(tokens),)
    needed_bytes = sum(kv.reservation_bytes(one) for one in judged)
    idle = Promised(max_rows=running.max_rows)
    if idle.lane_for(kv, max(tokens)) is None or idle.joined_by(kv, judged) is None:
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
