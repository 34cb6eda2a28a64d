"""Who has waited or run too long, and the errors they are told."""

from __future__ import annotations

from machd.errors import MachdError, QueueTimeoutError, RequestTimeoutError
from machd.scheduler.slots import Slots
from machd.scheduler.subscriber import Subscriber
from machd.scheduler.waiting import QueueLimits, WaitingQueue


def overdue(
    limits: QueueLimits, waiting: WaitingQueue, slots: Slots, now_s: float
) -> list[tuple[Subscriber, MachdError]]:
    """Sequences whose time is over, those that wait first, in order."""
    late = [
        (one, _request_timeout(limits))
        if one.is_group_started
        else (one, _queue_timeout(limits, retry_after_s=waiting.retry_after_s()))
        for one in waiting.expired(now_s)
    ]
    oldest_s = now_s - limits.request_timeout_s
    late += [
        (subscriber, _request_timeout(limits))
        for sequence in slots
        for subscriber in sequence.subscribers
        if subscriber.request.arrived_s <= oldest_s
    ]
    return late


def _queue_timeout(limits: QueueLimits, *, retry_after_s: int) -> MachdError:
    """For a sequence that found no slot in time."""
    return QueueTimeoutError(
        f"no slot became free within limits.queue_timeout_s ({limits.queue_timeout_s:g} s)",
        retry_after_s=retry_after_s,
    )


def _request_timeout(limits: QueueLimits) -> MachdError:
    """For a sequence of a request that took too long altogether."""
    return RequestTimeoutError(
        f"the request ran longer than limits.request_timeout_s ({limits.request_timeout_s:g} s)"
    )
