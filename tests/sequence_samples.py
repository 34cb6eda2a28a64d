"""Sequences and limits for tests of the scheduler; sizes are named, contents are not."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items
from typing import TypeVar

from machd.engine.protocol import Engine, SamplingParams
from machd.scheduler.events import Event
from machd.scheduler.protocol import Scheduler
from machd.scheduler.sequence import Sequence, SequenceRequest
from machd.scheduler.waiting import QueueLimits

__all__ = ["END_OF_TEXT", "LIMITS", "only", "request_of", "run_step", "sequence_of"]

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
) -> SequenceRequest:
    """A request whose prompt is the ids 0, 1, 2 and so on."""
    return SequenceRequest(
        sequence_id=sequence_id,
        group_id=group_id or sequence_id,
        prompt=tuple(range(prompt_tokens)),
        sampling=SamplingParams(),
        max_tokens=max_tokens,
        stop_token_ids=frozenset(stop_token_ids),
        arrived_s=arrived_s,
    )


def sequence_of(
    sequence_id: str = "a",
    *,
    prompt_tokens: int = 4,
    max_tokens: int = 4,
    arrived_s: float = 0.0,
) -> Sequence:
    """A waiting sequence."""
    return Sequence(
        request_of(
            sequence_id, prompt_tokens=prompt_tokens, max_tokens=max_tokens, arrived_s=arrived_s
        )
    )


def only(kind: type[_T], events: Items[object]) -> list[_T]:
    """The events of one kind, in order."""
    return [event for event in events if isinstance(event, kind)]


def run_step(scheduler: Scheduler, engine: Engine, now_s: float) -> list[Event]:
    """One pass of admit, plan, run, commit, as the serving loop does it."""
    events = scheduler.admit(now_s)
    plan = scheduler.plan()
    return events + scheduler.commit(plan, engine.run(plan), now_s)
