"""Sequences and limits for tests of the scheduler; sizes are named, contents are not."""

from __future__ import annotations

from collections.abc import Collection as Items
from collections.abc import Iterable
from dataclasses import replace
from typing import TypeVar

from machd.engine.protocol.engine import Engine
from machd.engine.protocol.step import Lane, PrefillChunk, RowFault, SampledToken, SpanCost
from machd.request.generation import SamplingParams
from machd.scheduler.admission import Batching, KvBudget, KvPolicy
from machd.scheduler.config import SchedulerConfig
from machd.scheduler.events import Event, OutputGenerated
from machd.scheduler.pacing import PREFILL_SHARE, StepPace
from machd.scheduler.scheduler import Scheduler
from machd.scheduler.sequence import Sequence
from machd.scheduler.subscriber import Priority, SequenceRequest, Subscriber
from machd.scheduler.waiting import QueueLimits
from support.engines.fake_engine import FakeEngine

END_OF_TEXT = 256
"""The fake engine's end-of-text token."""

LIMITS = QueueLimits(
    max_queue=8, max_queue_tokens=1000, queue_timeout_s=10.0, request_timeout_s=100.0
)

_T = TypeVar("_T")


def request_of(
    sequence_id: str = "a",
    *,
    group_id: str = "",
    prompt_tokens: int = 4,
    max_tokens: int = 4,
    stop_token_ids: Iterable[int] = (END_OF_TEXT,),
    arrived_s: float = 0.0,
    sampling: SamplingParams | None = None,
    priority: Priority = Priority.NORMAL,
    namespace: str = "",
) -> SequenceRequest:
    """A request whose prompt is the ids 0, 1, 2 and so on; its request id is its group's."""
    return SequenceRequest(
        sequence_id=sequence_id,
        group_id=group_id or sequence_id,
        prompt=tuple(range(prompt_tokens)),
        sampling=sampling or SamplingParams(),
        max_tokens=max_tokens,
        stop_token_ids=frozenset(stop_token_ids),
        arrived_s=arrived_s,
        request_id=f"req-{group_id or sequence_id}",
        namespace=namespace,
        priority=priority,
    )


def subscriber_of(
    sequence_id: str = "a",
    *,
    prompt_tokens: int = 4,
    max_tokens: int = 4,
    arrived_s: float = 0.0,
) -> Subscriber:
    """A waiting sequence."""
    return Subscriber(
        request_of(
            sequence_id, prompt_tokens=prompt_tokens, max_tokens=max_tokens, arrived_s=arrived_s
        )
    )


def sequence_of(
    sequence_id: str = "a",
    *,
    number: int | None = None,
    prompt_tokens: int = 4,
    max_tokens: int = 4,
    arrived_s: float = 0.0,
    priority: Priority = Priority.NORMAL,
) -> Sequence:
    """A waiting sequence with one subscriber; without a number, the letter's."""
    request = request_of(
        sequence_id,
        prompt_tokens=prompt_tokens,
        max_tokens=max_tokens,
        arrived_s=arrived_s,
        priority=priority,
    )
    number = ord(sequence_id[0]) if number is None else number
    return Sequence(Subscriber(request), number=number, submitted_s=arrived_s, keeps_tokens=True)


def running_decode_of(
    sequence_id: str = "a",
    *,
    slot_index: int = 0,
    lane: Lane = Lane.BATCH,
    prompt_tokens: int = 4,
    max_tokens: int = 4,
) -> Sequence:
    """The same, in a slot."""
    sequence = sequence_of(sequence_id, prompt_tokens=prompt_tokens, max_tokens=max_tokens)
    sequence.admit(slot_index, lane, now_s=0.0)
    return sequence


def batching_of(
    *,
    max_b: int = 4,
    window_s: float = 0.0,
    prefill_chunk_tokens: int | None = 512,
    coalesce: bool = False,
    budget_tokens: int = 100_000,
    policy: KvPolicy = KvPolicy.DEFER,
    shares_prefixes: bool = False,
) -> Batching:
    """Batching with a budget of so many positions; a position costs 10 bytes, a sequence none.

    Rows that can share prefixes have length classes.
    """
    kv = KvBudget(
        budget_tokens * 10,
        bytes_per_token=10,
        bytes_per_sequence=0,
        policy=policy,
        has_length_classes=shares_prefixes,
        shares_prefixes=shares_prefixes,
    )
    return Batching(max_b, window_s, prefill_chunk_tokens, coalesce, kv, PREFILL_SHARE)


class LateFirstToken(FakeEngine):
    """An engine that gives a row's first token with its first sequence, not with its last chunk."""

    def _prefill(self, chunk: PrefillChunk) -> list[SampledToken | RowFault]:
        return super()._prefill(replace(chunk, is_last=False))


def only(kind: type[_T], events: Items[object]) -> list[_T]:
    """The events of one kind, in order."""
    return [event for event in events if isinstance(event, kind)]


def outputs_of(kind: type[_T], events: Items[object], sequence_id: str | None = None) -> list[_T]:
    """The outputs of one kind that events bring, in order: of every sequence, or of one."""
    return [
        event.output
        for event in only(OutputGenerated, events)
        if isinstance(event.output, kind) and sequence_id in (None, event.sequence_id)
    ]


def run_step(scheduler: Scheduler, engine: Engine, now_s: float) -> list[Event]:
    """One pass of admit, plan, run, commit, as the serving loop does it."""
    events = scheduler.admit(now_s)
    plan = scheduler.plan()
    return events + scheduler.commit(plan, engine.run(plan), now_s, duration_s=0.0)


class EagerPace(StepPace):
    """A pace that allows all drafts in every step, whether they pay or not."""

    def draft_tokens(self, lane: Lane, rows: int, max_tokens: int) -> int:
        """Return all that may be."""
        del lane, rows
        return max_tokens

    def span_cost(self, lane: Lane, rows: int) -> SpanCost:
        """Return a cost at which every token ahead is worth it."""
        del lane, rows
        return SpanCost()


def drafting_eagerly(config: SchedulerConfig) -> SchedulerConfig:
    """Return the config with an eager pace."""
    pace = config.pace
    eager = EagerPace(beside_decode=pace._beside_decode, alone=pace._alone)
    return replace(config, pace=eager)
